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

BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class CapturedState:
    """A model's state in the host memory of `ranks`, which must still be alive when it is persisted.

    `writer`: the threads of the ranks that write it.
    """

    number: int
    contents: CheckpointContents
    ranks: Actors
    writer: Writer = "checkpoints"

    async def persist(self, directory: str) -> int:
        """Write the checkpoint directory, atomically, while units of work go on; returns its bytes.

        It must not exist. Nothing is left on the disk after StorageError, which names the rank, nor after
        TrainerError: the captured state died with a rank. It may be written again until `drop`.
        """
        target = Path(directory)
        scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            return await self._write(str(scratch), directory)
        except SkyrlTinkerError as error:
            await self._drop_far(str(scratch))
            left = [scratch]
            if isinstance(error, RankDiedError):  # its peers may write on until they are gone
                self.ranks.kill()
                await self.ranks.wait_gone()
                left.append(target)  # it was complete, and the answer died with its rank
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
        for rank in self._ranks_apart(scratch):
            await self._bring(rank, Path(scratch))
        await self._drop_far(scratch)
        files: dict[str, FileEntry] = {name: entry for part in parts for name, entry in part.items()}
        size: int = await self.ranks.write_call(
            0, self.writer, "commit_state", self.number, files, scratch, directory
        )
        return size

    def _ranks_apart(self, directory: str) -> list[int]:
        """Return the ranks that have another directory of this path: one in their own host's memory."""
        return self.ranks.far_ranks if Path(directory).is_relative_to(self.ranks.memory_root) else []

    async def _bring(self, rank: int, directory: Path) -> None:
        """Copy what a rank has written to its host's memory to ours."""
        files: dict[str, int] = await self._far(rank, "list_files", str(directory))
        for name, size in files.items():
            with (directory / name).open("wb") as file:
                for offset in range(0, size, BLOCK_BYTES):
                    block = await self._far(rank, "read_file", str(directory / name), offset, BLOCK_BYTES)
                    await asyncio.to_thread(file.write, block)

    async def _drop_far(self, directory: str) -> None:
        """Remove it from the hosts of other ranks; what those hold that died is theirs no more."""
        for rank in self._ranks_apart(directory):
            with suppress(SkyrlTinkerError):
                await self._far(rank, "remove_files", directory)

    async def _far(self, rank: int, method: str, *args: Any) -> Any:
        return await self.ranks.write_call(rank, self.writer, method, *args)

    async def open_in_senders(self, limit: int) -> list[Any]:
        """Have each rank's weight sender open what the rank holds of a full model; its answers, by rank.

        TrainerError when a rank has died.
        """
        return await self.ranks.open_captured(self.number, limit)

    async def drop(self) -> None:
        """Free the copies; ranks that died have none."""
        with suppress(SkyrlTinkerError):
            await self.ranks.write_call_all(self.writer, "drop_captured", self.number)
