"""Captured state of models in the ranks' host memory, its bound, and the checkpoints made of it."""

import asyncio
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.manifest import CheckpointContents, FileEntry
from skyrl_tinker.errors import RankDiedError, SkyrlTinkerError
from skyrl_tinker.training.actors import Actors, Writer
from skyrl_tinker.training.far_directory import FarDirectory

SHARE = 4
"""Captured state takes at most 1 / SHARE of a host's memory."""


class CapturedBytes:
    """Bytes captured on all ranks together, with their bound.

    The bound is that of the smallest host, as one host may hold everything: rank 0's holds all adapters. If
    nothing is captured, one capture is always allowed. A capture counts as its model's weights in float32, or
    with the optimizer's moments as its whole state.
    """

    def __init__(self) -> None:
        self.most = 0
        self._of_model: dict[ModelKey, tuple[int, int]] = {}  # weights, state
        self._held: dict[int, int] = {}  # by number of the capture
        self._freed = asyncio.Event()

    def know(self, model: ModelKey, weight_bytes: int, state_bytes: int) -> None:
        self._of_model[model] = weight_bytes, state_bytes

    def forget(self, model: ModelKey) -> None:
        self._of_model.pop(model, None)

    @property
    def held(self) -> int:
        return sum(self._held.values())

    def size(self, model: ModelKey, *, optimizer: bool) -> int:
        """Return the bytes of a capture, with or without the moments; 0 of an unknown model."""
        return self._of_model.get(model, (0, 0))[optimizer]

    def fitting(self, sizes: Sequence[int]) -> int:
        """Return how many captures of these sizes, from the first on, may be held together now."""
        left, count = self.most - self.held, 0
        for size in sizes:
            left -= size
            if left < 0 and (count or self._held):
                break
            count += 1
        return count

    def take(self, number: int, size: int) -> None:
        self._held[number] = size

    def holds(self, number: int) -> bool:
        return number in self._held

    def free(self, number: int) -> None:
        """Idempotent."""
        if self._held.pop(number, None) is not None:
            self._freed.set()
            self._freed = asyncio.Event()

    def next_free(self) -> asyncio.Event:
        """Return the event of the next `free`; it is set if nothing is captured."""
        freed = self._freed if self._held else asyncio.Event()
        if not self._held:
            freed.set()
        return freed


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
        """Free the copies, unless they are free; dead ranks have none. Repeat a call that was cancelled."""
        if not self.counted.holds(self.number):
            return
        with suppress(SkyrlTinkerError):
            await self.ranks.write_call_all("drops", "drop_captured", self.number)
        self.counted.free(self.number)
