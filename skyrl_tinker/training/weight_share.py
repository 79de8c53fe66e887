"""One rank's share of captured full weights, as its weight sender reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class WeightShare:
    """`dealt`: names and shapes of the tensors of every rank, by rank; `tensors`: those of `rank`.

    `group`: all ranks, for transfers beside the passes; None: there is only one.
    """

    rank: int
    dtype: torch.dtype
    dealt: Sequence[Mapping[str, tuple[int, ...]]]
    tensors: Mapping[str, torch.Tensor]
    group: dist.ProcessGroup | None
