"""Captured state of a model in the ranks' host memory, and its checkpoint on disk."""

import asyncio
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_tinker.domain.manifest import CheckpointContents, FileEntry
from skyrl_tinker.errors import RankDiedError, SkyrlTinkerError
from skyrl_tinker.training.actors import Actors, Writer
from skyrl_tinker.training.captured_bytes import CapturedBytes
from skyrl_tinker.training.far_directory import FarDirectory


@dataclass(frozen=True, slots=True)
class CapturedState:
    """A model's state in the host memory of `ranks`, which must still be alive when it is persisted.

    `writer`: the threads of the ranks that write it. `counted`: has its bytes until `drop`.
    """

    number: int
    contents: CheckpointContents
    ranks: Actors
    counted: CapturedBytes
    writer: Writer = "checkpoints"

    async def persist(self, directory: str) -> int:
        """Write the checkpoint directory, atomically, while units of work go on; returns its bytes.

        The directory must not exist. Raises StorageError, which names the rank, or TrainerError if the state
        was lost with a rank; either leaves nothing on the disk. May be called again until `drop`.
        """
        target = Path(directory)
        scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            return await self._write(str(scratch), directory)
        except SkyrlTinkerError as error:
            await self._elsewhere(str(scratch)).drop()
            left = [scratch]
            if isinstance(error, RankDiedError):  # its peers may go on writing until they have ended
                self.ranks.kill()
                await self.ranks.wait_gone()
                left.append(target)  # complete, but the rank died before its reply
            for path in left:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            raise

    async def _write(self, scratch: str, directory: str) -> int:
        if self.contents.writers == 1:
            alone: int = await self.ranks.write_call(
                0, self.writer, "write_state", self.number, scratch, directory
            )
            return alone
        parts = await self.ranks.write_call_all(self.writer, "persist_state", self.number, scratch)
        elsewhere = self._elsewhere(scratch)
        await elsewhere.bring()
        await elsewhere.drop()
        files: dict[str, FileEntry] = {name: entry for part in parts for name, entry in part.items()}
        size: int = await self.ranks.write_call(
            0, self.writer, "commit_state", self.number, files, scratch, directory
        )
        return size

    def _elsewhere(self, directory: str) -> FarDirectory:
        return FarDirectory(self.ranks, directory)

    async def open_in_senders(self, limit: int) -> list[Any]:
        """Have each rank's weight sender open its rank's share of a full model; replies by rank.

        Raises TrainerError when a rank has died, SamplerError when a sender failed.
        """
        return await self.ranks.open_captured(self.number, limit)

    async def drop(self) -> None:
        """Free the copies; dead ranks have none. Harmless if they are free. Call it again if it was cancelled."""
        if not self.counted.holds(self.number):
            return
        with suppress(SkyrlTinkerError):
            await self.ranks.write_call_all("drops", "drop_captured", self.number)
        self.counted.free(self.number)
