"""Chunks of whole tensors that the ranks have captured and hold. Imported in the ranks only.

The ranks pass chunks on over gloo, on GPUs too, where this has not run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from skyrl_tinker.errors import TrainerError
from skyrl_tinker.weight_sync.chunks import TensorEntry, WeightChunk, cut

Shapes = Mapping[str, tuple[int, ...]]


class CapturedShare(Protocol):
    """One rank's captured weights: `training.weight_share.WeightShare`.

    `dealt`: shapes of every rank's tensors, by rank, the same on all of them; `tensors`: this rank's, of one
    dtype, in host or device memory. `group`: all ranks, for transfers only; None: there is one rank.
    """

    @property
    def rank(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def dealt(self) -> Sequence[Shapes]: ...
    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def group(self) -> dist.ProcessGroup | None: ...


@dataclass(frozen=True, slots=True)
class CapturedChunk(WeightChunk):
    """Tensors of the rank `owner` alone."""

    owner: int


class CapturedSource:
    """Source of captured weights: the owner of a chunk packs it and passes it on.

    `fill` is a collective: every rank must fill all chunks, in order.
    """

    def __init__(self, share: CapturedShare, limit: int, *, everywhere: bool) -> None:
        """`everywhere`: all ranks get the bytes of a chunk; else only its owner and rank 0 have them."""
        self.chunks = captured_chunks(share.dealt, share.dtype, limit)
        self._share = share
        self._everywhere = everywhere
        self.on_device = share.group is None  # gloo sends from the host

    def fill(self, index: int, buffer: torch.Tensor) -> None:
        """Pack or receive a chunk. Raises TrainerError if passing it on failed: the group is unusable."""
        chunk = self.chunks[index]
        if chunk.owner == self._share.rank:
            self._pack(chunk, buffer)
        if self._share.group is not None:
            try:
                self._pass_on(buffer, chunk.owner, self._share.group)
            except RuntimeError as error:
                raise TrainerError(f"rank {self._share.rank} could not pass weights on: {error}") from error

    def _pack(self, chunk: CapturedChunk, buffer: torch.Tensor) -> None:
        parts = buffer.split(chunk.sizes)  # type: ignore[no-untyped-call]
        for name, part in zip(chunk.names, parts, strict=True):
            flat = self._share.tensors[name].reshape(-1).view(torch.uint8)
            part.copy_(flat, non_blocking=True)

    def _pass_on(self, buffer: torch.Tensor, owner: int, group: dist.ProcessGroup) -> None:
        if self._everywhere:
            group.broadcast(buffer, owner).wait()
        elif owner and self._share.rank == owner:
            group.send([buffer], 0, 0).wait()
        elif owner and self._share.rank == 0:
            group.recv([buffer], owner, 0).wait()


def captured_chunks(dealt: Sequence[Shapes], dtype: torch.dtype, limit: int) -> list[CapturedChunk]:
    """Return the chunks, one rank after the other: so few layers at a time have arrived only in part."""
    return [
        CapturedChunk(group, owner)
        for owner, shapes in enumerate(dealt)
        for group in cut(_entries(shapes, dtype), limit)
    ]


def _entries(shapes: Shapes, dtype: torch.dtype) -> list[TensorEntry]:
    name_of_dtype = str(dtype).removeprefix("torch.")
    return [TensorEntry(name, name_of_dtype, tuple(shape), dtype.itemsize) for name, shape in shapes.items()]
