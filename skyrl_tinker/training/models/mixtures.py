"""Mixtures of experts in a network: matrices of all experts in one tensor, each by its own name in files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

MATRICES: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""Linear layers, one below the other, in the tensors [experts, outputs, inputs] of a mixture."""

_KINDS = frozenset({"Qwen3MoeExperts"})


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


def router_of(mixture: str) -> str:
    """Return the name of the module that chooses the experts of this one."""
    return f"{mixture.rpartition('.')[0]}.gate"


def pieces(owner: str, shape: Sequence[int]) -> Iterator[Piece]:
    """Yield the matrices in a parameter of a mixture; none of another parameter."""
    mixture, _, matrix = owner.rpartition(".")
    if len(shape) != 3:
        return
    layers = MATRICES[matrix]
    size, inputs = shape[1] // len(layers), shape[2]
    for expert in range(shape[0]):
        for number, layer in enumerate(layers):
            rows = slice(number * size, (number + 1) * size)
            yield Piece(f"{mixture}.{expert}.{layer}.weight", owner, expert, rows, (size, inputs))
