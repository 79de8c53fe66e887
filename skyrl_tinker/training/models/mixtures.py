"""Mixtures of experts in a network: one tensor has the matrices of all experts, in files often one each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

MATRICES = ("gate_up_proj", "down_proj")
"""Tensors of a mixture with the matrices of all experts, [experts, outputs, inputs] or as `transposed`."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Layout of experts. `layers`: the linear layers in each tensor of MATRICES, one below the other."""

    layers: Mapping[str, tuple[str, ...]]
    whole: bool = False  # in files, too, all experts are one tensor, and so are their adapters
    transposed: bool = False  # [experts, inputs, outputs]
    biases: bool = False  # [experts, outputs], named after the tensor
    gate: str | None = None  # module beside the experts that chooses them, if its choice can be replayed

    def weight(self, module: Any, matrix: str) -> torch.Tensor:
        """Return a tensor of the mixture as [experts, outputs, inputs]."""
        tensor: torch.Tensor = getattr(module, matrix)
        return tensor.mT if self.transposed else tensor

    def bias(self, module: Any, matrix: str) -> torch.Tensor | None:
        return getattr(module, f"{matrix}_bias") if self.biases else None


_SPLIT = ExpertLayout({"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}, gate="gate")
_WHOLE = ExpertLayout({matrix: (matrix,) for matrix in MATRICES}, whole=True, transposed=True, biases=True)
_KINDS = {"Qwen3MoeExperts": _SPLIT, "GptOssExperts": _WHOLE}


@dataclass(frozen=True, slots=True)
class Piece:
    """Matrix of one expert, `name` in files: certain rows of the stacked tensor `owner`."""

    name: str
    owner: str
    expert: int
    rows: slice
    shape: tuple[int, int]

    def of(self, stacked: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return a view. `stacked` has the experts from `first` on; without this one, the view is empty."""
        if 0 <= self.expert - first < len(stacked):
            return stacked[self.expert - first, self.rows]
        return stacked[:0, self.rows].flatten(0, 1)


def find_mixtures(causal_lm: nn.Module) -> dict[str, Any]:
    """Return the modules that compute the experts of a layer, by name; the router is none of them."""
    return {name: module for name, module in causal_lm.named_modules() if type(module).__name__ in _KINDS}


def layout_of(mixture: nn.Module) -> ExpertLayout:
    return _KINDS[type(mixture).__name__]


def find_pieces(causal_lm: nn.Module) -> dict[str, tuple[Piece, ...]]:
    """Return, by parameter, the experts' matrices that are separate tensors in files."""
    return {
        f"{name}.{matrix}": tuple(_pieces(f"{name}.{matrix}", getattr(module, matrix).shape, layers))
        for name, module in find_mixtures(causal_lm).items()
        if not layout_of(module).whole
        for matrix, layers in layout_of(module).layers.items()
    }


def _pieces(owner: str, shape: Sequence[int], layers: Sequence[str]) -> Iterator[Piece]:
    mixture = owner.rpartition(".")[0]
    size, inputs = shape[1] // len(layers), shape[2]
    for expert in range(shape[0]):
        for number, layer in enumerate(layers):
            rows = slice(number * size, (number + 1) * size)
            yield Piece(f"{mixture}.{expert}.{layer}.weight", owner, expert, rows, (size, inputs))
