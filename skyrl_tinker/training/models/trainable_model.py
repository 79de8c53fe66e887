"""Interface of a trainable model, adapter or full copy, to optimizers, passes and checkpoints."""

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec, OptimizerFamily
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.shortage import Shortage

_CHUNK = 1 << 22
"""Entries of which a norm is taken at once."""


class Part(StrEnum):
    """Tensors that a model has per parameter; AdamW's by torch.optim.AdamW's names for its state."""

    WEIGHT = "weight"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MOMENTUM = "momentum"


MOMENTS: Mapping[OptimizerFamily, tuple[Part, ...]] = {
    "adamw": (Part.EXP_AVG, Part.EXP_AVG_SQ),
    "dimuon": (Part.MOMENTUM,),
}
"""State that an optimizer keeps between steps, each of the weights' size."""


class Kind(StrEnum):
    """Role of a parameter in the network, for optimizers of matrices."""

    MATRIX = "matrix"  # a linear map [out, in]
    TABLE = "table"  # rows [tokens, features] of which an input picks one
    VECTOR = "vector"  # any other number of dimensions


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Copying to host memory, after a cast on the device. `pinned`: copy a GPU's tensors to pinned memory.

    A copy in pinned memory is complete when the current stream is. The process keeps freed pinned memory.
    """

    dtype: torch.dtype
    pinned: bool = False

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        cast = tensor.detach().to(self.dtype)
        if self.pinned and cast.is_cuda:
            host = torch.empty(cast.shape, dtype=self.dtype, pin_memory=True)
            return host.copy_(cast, non_blocking=True)
        return cast.to("cpu", copy=cast.data_ptr() == tensor.data_ptr())


def l2_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm, float64 scalar. Works in chunks, as torch makes a converted copy of its input."""
    parts = tensor.flatten().split(_CHUNK)  # type: ignore[no-untyped-call]
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    norm: torch.Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return norm


class TrainableModel(ABC):
    """Weights, accumulated gradients and optimizer moments of one model. All float32."""

    network_key: ModelKey | None
    """None: runs on the shared frozen base; else the key of its own network."""

    def __init__(self, spec: LoraSpec, optimizer: OptimizerFamily) -> None:
        self.spec = spec
        self.optimizer = optimizer
        self.step = 0
        self.has_gradients = False
        self._in_pass = False
        self.bounds: Mapping[Part, float] | None = None
        """Upper bounds of the magnitudes of weights and moments, the same on all ranks. None: not known."""
        self._moments: dict[Part, list[torch.Tensor]] = {}

    @property
    def moments(self) -> tuple[Part, ...]:
        return MOMENTS[self.optimizer]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on all ranks together."""
        return 4 * sum(map(math.prod, self.shapes().values()))

    @property
    def state_bytes(self) -> int:
        """Bytes of weights and moments on all ranks together."""
        return (1 + len(self.moments)) * self.weight_bytes

    def local(self, part: Part) -> list[torch.Tensor]:
        """Return this rank's tensors; moments are created on first use."""
        if part is Part.WEIGHT:
            return self._weights()
        self.make_moments()
        return self._moments[part]

    def make_moments(self) -> None:
        """Create the moments, all zero, if there are none; all of them or, where memory runs out, none."""
        if not self._moments:
            weights = self._weights()
            self._moments = {part: [torch.zeros_like(each) for each in weights] for part in self.moments}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that this rank keeps between passes."""
        yield from self._own_tensors()
        for moments in self._moments.values():
            yield from moments

    def blanks(self) -> Iterator[torch.Tensor]:
        """Yield those of `tensors` that are all zero, so that no copy is needed to restore them."""
        if not self.has_gradients:
            yield from self._local_gradients()

    def reset_optimizer(self) -> None:
        self.step = 0
        self.bounds = None
        self._moments = {}

    def measure_bounds(self, ranks: Ranks) -> dict[Part, float]:
        """Return the global L2 norms of weights and moments. Every rank must call it."""
        parts = (Part.WEIGHT, *self.moments)
        norms = torch.stack([self._global_norm(self.local(part), ranks) for part in parts])
        return dict(zip(parts, norms.tolist(), strict=True))

    def begin(self) -> None:
        """Keep the gradients, to undo a pass with `rollback`."""
        self._keep_gradients()
        self._in_pass = True

    def rollback(self) -> None:
        """Restore the gradients at `begin`, to the last bit. No effect on a model that is in no pass."""
        if self._in_pass:
            self._restore_gradients()
            self._in_pass = False

    def commit(self) -> None:
        """Add the gradients of the pass to the accumulated ones."""
        self._join_gradients()
        self._in_pass = False
        self.has_gradients = True

    def gradient_sum(self) -> torch.Tensor:
        """Sum up all entries of this rank's gradients, within a pass; zero if there are none.

        The sum is not finite if an entry is not, but also if it overflows: `gradients_finite` decides.
        """
        sums = [gradient.sum() for gradient in self._local_gradients()]
        return torch.stack(sums).sum() if sums else torch.zeros(())

    def gradients_finite(self) -> bool:
        """Check each entry of this rank's gradients, within a pass."""
        return all(bool(gradient.isfinite().all()) for gradient in self._local_gradients())

    def clear_gradients(self) -> None:
        self._drop_gradients()
        self.has_gradients = False

    @abstractmethod
    def _weights(self) -> list[torch.Tensor]: ...

    @abstractmethod
    def _own_tensors(self) -> Iterator[torch.Tensor]:
        """Yield weights, gradients and all else but moments; views of them may be left out."""

    @abstractmethod
    def _local_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that exist. Outside of a pass they are zero without `has_gradients`."""

    @abstractmethod
    def _keep_gradients(self) -> None:
        """Keep the gradients for `_restore_gradients`. An error leaves them unchanged."""

    @abstractmethod
    def _restore_gradients(self) -> None: ...

    @abstractmethod
    def _global_norm(self, tensors: list[torch.Tensor], ranks: Ranks) -> torch.Tensor:
        """Return the L2 norm, float64 scalar, of tensors of which each rank has its share."""

    @abstractmethod
    def _join_gradients(self) -> None: ...

    @abstractmethod
    def _drop_gradients(self) -> None: ...

    @abstractmethod
    def reduced_gradients(self, ranks: Ranks) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return (this rank's gradients, summed over ranks; their global L2 norm, float64 scalar)."""

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the whole shapes by checkpoint name."""

    @abstractmethod
    def kind(self, name: str) -> Kind: ...

    @abstractmethod
    def select(self, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return this rank's share of one parameter, from a list like those of `local`."""

    def gather(self, name: str, share: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor from the ranks' shares. Every rank must call it, in the same order."""
        return share

    def shard(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a tensor that every rank has whole."""
        return whole

    def share(self, part: Part, name: str) -> torch.Tensor:
        """Return this rank's share of one parameter."""
        return self.select(name, self.local(part))

    def read(self, part: Part, name: str) -> torch.Tensor:
        """Return the whole tensor. Every rank must call it, in the same order."""
        return self.gather(name, self.share(part, name))

    def write(self, part: Part, name: str, tensor: torch.Tensor) -> None:
        """Set a whole tensor; every rank is given the same one."""
        self.bounds = None
        self.share(part, name).copy_(self.shard(name, tensor))

    def rows(self, name: str) -> slice:
        """Return the rows of a whole tensor that are this rank's share."""
        return slice(None)

    @abstractmethod
    def host_copies(
        self, part: Part, copy: HostCopy, names: Container[str], shortage: Shortage
    ) -> dict[str, torch.Tensor]:
        """Return whole copies of these tensors in host memory; some lack where memory ran out.

        Every rank must call it, in the same order. One tensor at a time is whole on the device.
        """
