"""What a trainable model is to the optimizer, to a pass and to a checkpoint, whether adapter or full copy."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from enum import StrEnum

import torch

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec, OptimizerFamily
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.state_ledger import GRADIENT


class Part(StrEnum):
    """The tensors a model has per parameter; AdamW's by torch.optim.AdamW's names for its state."""

    WEIGHT = "weight"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MOMENTUM = "momentum"
    GRADIENT = GRADIENT


MOMENTS: Mapping[OptimizerFamily, tuple[Part, ...]] = {
    "adamw": (Part.EXP_AVG, Part.EXP_AVG_SQ),
    "dimuon": (Part.MOMENTUM,),
}
"""What an optimizer keeps between steps, each of the weights' size."""


class Kind(StrEnum):
    """What a parameter is to the network, which is what an optimizer of matrices asks."""

    MATRIX = "matrix"  # a linear map [out, in]
    TABLE = "table"  # rows [tokens, features] of which an input picks one
    VECTOR = "vector"  # whatever has not two dimensions


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
        self._moments: dict[Part, list[torch.Tensor]] = {}

    @property
    def moments(self) -> tuple[Part, ...]:
        return MOMENTS[self.optimizer]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All that a pass or a step changes."""
        return (Part.WEIGHT, *self.moments, Part.GRADIENT)

    def local(self, part: Part) -> list[torch.Tensor]:
        """This rank's tensors; moments are made when first asked for."""
        if part is Part.WEIGHT:
            return self._weights()
        if part is Part.GRADIENT:
            return self._local_gradients()
        if part not in self._moments:
            self._moments[part] = [torch.zeros_like(weight) for weight in self._weights()]
        return self._moments[part]

    def has(self, part: Part) -> bool:
        """Whether it is anything but zeros that are made when they are asked for."""
        if part is Part.GRADIENT:
            return self.has_gradients
        return part is Part.WEIGHT or part in self._moments

    def make_gradients(self) -> None:
        """To be filled with accumulated ones."""
        self._make_gradients()
        self.has_gradients = True

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that this rank keeps between passes."""
        yield from self._own_tensors()
        for moments in self._moments.values():
            yield from moments

    def blanks(self) -> Iterator[torch.Tensor]:
        """Those of `tensors` that hold nothing but zeros: they need not be kept to be brought back."""
        if not self.has_gradients:
            yield from self._local_gradients()

    def reset_optimizer(self) -> None:
        self.step = 0
        self._moments.clear()

    def begin(self) -> None:
        """Keep what is needed to undo a pass."""
        self._keep_gradients()
        self._in_pass = True

    def rollback(self) -> None:
        """Back to the gradients at `begin`, to the last bit. Nothing to do for a model that is in no pass."""
        if self._in_pass:
            self._restore_gradients()
            self._in_pass = False

    def commit(self) -> None:
        """The pass was good: its gradients join the accumulated ones."""
        self._join_gradients()
        self._in_pass = False
        self.has_gradients = True

    def gradients_finite(self) -> bool:
        """Those of this rank, within a pass."""
        gradients = self._local_gradients()
        # What is not finite makes a sum that is not. So may what is: only then is each looked at.
        sums = [each.sum() for each in gradients]
        if not sums or bool(torch.stack(sums).sum().isfinite()):
            return True
        return all(bool(each.isfinite().all()) for each in gradients)

    def clear_gradients(self) -> None:
        self._drop_gradients()
        self.has_gradients = False

    @abstractmethod
    def _weights(self) -> list[torch.Tensor]: ...

    @abstractmethod
    def _own_tensors(self) -> Iterator[torch.Tensor]:
        """Weights, gradients and what else is not a moment; views of them may be left out."""

    @abstractmethod
    def _local_gradients(self) -> list[torch.Tensor]:
        """As far as there are any. Zero without `has_gradients`, outside of a pass."""

    @abstractmethod
    def _keep_gradients(self) -> None:
        """For `_restore_gradients`. Whatever is raised here, they are as they were."""

    @abstractmethod
    def _restore_gradients(self) -> None: ...

    @abstractmethod
    def _join_gradients(self) -> None: ...

    @abstractmethod
    def _drop_gradients(self) -> None: ...

    @abstractmethod
    def _make_gradients(self) -> None:
        """Have `_local_gradients` of all parameters, whatever is in them."""

    @abstractmethod
    def reduced_gradients(self, ranks: Ranks) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(this rank's gradients, summed over ranks; their global L2 norm, float64 scalar)."""

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes by checkpoint name."""

    @abstractmethod
    def kind(self, name: str) -> Kind: ...

    @abstractmethod
    def own(self, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        """This rank's share of one parameter, in a list like those of `local`."""

    @abstractmethod
    def gather(self, name: str, share: torch.Tensor) -> torch.Tensor:
        """The whole of what each rank has a share of. Every rank must call it, in the same order."""

    @abstractmethod
    def share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's share of a tensor that every rank has whole."""

    def read(self, part: Part, name: str) -> torch.Tensor:
        """The whole tensor. Every rank must call it, in the same order."""
        return self.gather(name, self.own(name, self.local(part)))

    def write(self, part: Part, name: str, tensor: torch.Tensor) -> None:
        """Set a whole tensor; every rank is given the same one."""
        self.own(name, self.local(part)).copy_(self.share(name, tensor))
