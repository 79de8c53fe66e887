"""LoRA adapters (arXiv:2106.09685) of many models beside one frozen base, outside its module tree."""

import hashlib
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from skyrl_tinker.domain.peft_config import ALPHA, KEY_PREFIX, WHOLE_EXPERTS
from skyrl_tinker.domain.values import LoraSpec, OptimizerFamily
from skyrl_tinker.errors import StartupError, UserError
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models import mixtures
from skyrl_tinker.training.models.trainable_model import HostCopy, Kind, Part, TrainableModel, l2_norm
from skyrl_tinker.training.shortage import Shortage

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
MLP = frozenset({"gate_proj", "up_proj", "down_proj"})


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer of the base that can be adapted, or the same one of all experts of a mixture.

    `name` is its path in the causal LM; that of experts is without their numbers.
    """

    name: str
    inputs: int
    outputs: int
    is_head: bool
    experts: int = 0  # each has its own pair
    chosen: int = 1  # of the experts, for each token
    whole: bool = False  # in files, A of all experts is one tensor, and so is B, as PEFT has them

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the linear layers in files: one, or one of each expert."""
        if not self.experts:
            return (self.name,)
        mixture, _, leaf = self.name.rpartition(".")
        if self.whole:
            return (mixture + WHOLE_EXPERTS[leaf],)
        return tuple(f"{mixture}.{expert}.{leaf}" for expert in range(self.experts))

    def rank(self, whole: int) -> int:
        """Return the rank of each pair of an adapter of rank `whole`, which the chosen experts share.

        Together they then have as many parameters as a dense layer of their size would get ("LoRA Without
        Regret", thinkingmachines.ai/blog/lora).
        """
        return max(1, whole // self.chosen)

    @property
    def in_mlp(self) -> bool:
        return self.experts > 0 or self.leaf in MLP

    def selected_by(self, spec: LoraSpec) -> bool:
        if self.is_head:
            return spec.train_unembed
        return (spec.train_attn and self.leaf in ATTENTION) or (spec.train_mlp and self.in_mlp)


class Pair(NamedTuple):
    """Factors of a layer; those of experts have one dimension more, the first."""

    a: torch.Tensor  # [r, in], leaf
    b: torch.Tensor  # [out, r], leaf


class Factors(NamedTuple):
    """A pair as plain tensors, for code that computes its own gradients."""

    a: torch.Tensor
    b: torch.Tensor
    a_t: torch.Tensor  # a, transposed
    b_t: torch.Tensor
    grad_a: torch.Tensor  # to be added to
    grad_b: torch.Tensor

    @classmethod
    def from_pair(cls, pair: Pair) -> "Factors":
        assert pair.a.grad is not None
        assert pair.b.grad is not None
        a, b = pair.a.detach(), pair.b.detach()
        return cls(a, b, a.mT, b.mT, pair.a.grad, pair.b.grad)

    def to(self, dtype: torch.dtype) -> "Factors":
        """Convert all but the gradients."""
        a, b = self.a.to(dtype), self.b.to(dtype)
        return Factors(a, b, a.mT, b.mT, self.grad_a, self.grad_b)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Place of a tensor in the flat buffer. `order`: permutation of its dimensions, None if in order."""

    offset: int
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        view = flat[self.offset : self.end].view(self.shape)
        return view.permute(self.order) if self.order else view


class LoraModel(TrainableModel):
    """One adapter, the same on every rank.

    Its tensors are views of one flat buffer, and so are their gradients and moments, so that reducing,
    clipping and AdamW are one kernel each.
    """

    network_key = None

    def __init__(
        self,
        spec: LoraSpec,
        targets: Sequence[AdaptedLayer],
        device: torch.device,
        optimizer: OptimizerFamily = "adamw",
    ) -> None:
        """Create the adapter. Raises UserError when the spec selects no layer of the base."""
        super().__init__(spec, optimizer)
        self.targets = tuple(target for target in targets if target.selected_by(spec))
        if not self.targets:
            raise UserError(f"LoraConfig selects no layer of the base model: {spec}")
        require_matrices(self.targets, optimizer)
        self.scale = ALPHA / spec.rank
        slots, self._slots = _layout(self.targets, spec.rank)
        size = max(slot.end for slot in self._slots.values())
        self._flat = torch.zeros(size, device=device)
        self._gradients = torch.zeros(size, device=device)
        self._saved: torch.Tensor | None = None
        self._initialise()
        self.pairs: Mapping[str, Pair] = {
            name: Pair(*(self._leaf(slot) for slot in pair)) for name, pair in slots.items()
        }
        self.factors = {name: Factors.from_pair(pair) for name, pair in self.pairs.items()}

    @property
    def expert_rank(self) -> int:
        """Rank of the experts' pairs; the adapter's rank if there are none."""
        ranks = (target.rank(self.spec.rank) for target in self.targets if target.experts)
        return next(ranks, self.spec.rank)

    def _initialise(self) -> None:
        """Set A as PEFT does (Kaiming-uniform, a = sqrt 5), B zero; depends on seed and layer names only."""
        for target in self.targets:
            for module in target.modules:
                generator = torch.Generator().manual_seed(_seed(self.spec.seed, module))
                slot = self._slots[_key(module, "A")]
                fresh = torch.empty(slot.shape)
                nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator)
                slot.view(self._flat).copy_(fresh)

    def _leaf(self, slot: _Slot) -> torch.Tensor:
        leaf = slot.view(self._flat).detach().requires_grad_()
        leaf.grad = slot.view(self._gradients)
        return leaf

    def _weights(self) -> list[torch.Tensor]:
        return [self._flat]

    def _own_tensors(self) -> Iterator[torch.Tensor]:
        yield self._flat
        yield self._gradients

    def _local_gradients(self) -> list[torch.Tensor]:
        return [self._gradients]

    def _keep_gradients(self) -> None:
        self._saved = self._gradients.clone() if self.has_gradients else None

    def _restore_gradients(self) -> None:
        if self._saved is None:
            self._gradients.zero_()
        else:
            self._gradients.copy_(self._saved)
        self._saved = None

    def _join_gradients(self) -> None:
        self._saved = None  # the pass added to the accumulated ones in place

    def _drop_gradients(self) -> None:
        self._gradients.zero_()

    def reduced_gradients(self, ranks: Ranks) -> tuple[list[torch.Tensor], torch.Tensor]:
        ranks.sum_(self._gradients)
        return [self._gradients], self._global_norm([self._gradients], ranks)

    def _global_norm(self, tensors: list[torch.Tensor], ranks: Ranks) -> torch.Tensor:
        return l2_norm(tensors[0])  # whole on every rank

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: slot.shape for key, slot in self._slots.items()}

    def kind(self, name: str) -> Kind:
        return Kind.MATRIX

    def select(self, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        return self._slots[name].view(tensors[0])

    def host_copies(
        self, part: Part, copy: HostCopy, names: Container[str], shortage: Shortage
    ) -> dict[str, torch.Tensor]:
        chosen = [name for name in self._slots if name in names]
        copies: list[torch.Tensor] = []
        if chosen:
            shortage.survive(lambda: copies.extend(map(copy, self.local(part))))
        return {name: self.select(name, copies) for name in chosen if copies}


def find_targets(causal_lm: nn.Module, head: nn.Module) -> tuple[AdaptedLayer, ...]:
    """List the linear layers. Raises StartupError for a model with weights that no adapter would reach."""
    linear = {name: module for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear)}
    known = {
        name
        for name, module in linear.items()
        if module is head or name.rpartition(".")[2] in ATTENTION | MLP
    }
    found = mixtures.find_mixtures(causal_lm)
    strange = {name for name, parameter in causal_lm.named_parameters() if parameter.ndim > 2}
    strange -= {f"{name}.{matrix}" for name in found for matrix in mixtures.MATRICES}
    if others := [*(linear.keys() - known), *strange]:
        raise StartupError(
            f"{type(causal_lm).__name__}: adapters would leave out {min(others)} and {len(others) - 1} "
            f"others; expected no linear layers but {', '.join(sorted(ATTENTION | MLP))} and the head"
        )
    layers = [
        AdaptedLayer(name, linear[name].in_features, linear[name].out_features, linear[name] is head)
        for name in linear
    ]
    for name, mixture in found.items():
        layers += _of_experts(name, mixture, int(causal_lm.config.num_experts_per_tok))  # type: ignore[union-attr, arg-type]
    return tuple(layers)


def _of_experts(name: str, mixture: nn.Module, chosen: int) -> Iterator[AdaptedLayer]:
    layout = mixtures.layout_of(mixture)
    for matrix, layers in layout.layers.items():
        count, outputs, inputs = layout.weight(mixture, matrix).shape
        for layer in layers:
            part = outputs // len(layers)
            yield AdaptedLayer(f"{name}.{layer}", inputs, part, False, count, chosen, layout.whole)


def require_matrices(targets: Sequence[AdaptedLayer], optimizer: OptimizerFamily) -> None:
    """Raise UserError for Dimuon if a tensor stacks several matrices: it would treat them as one."""
    if optimizer == "dimuon" and any(target.whole for target in targets):
        raise UserError("optimizer dimuon: expected adamw for this base model, whose experts are one tensor")


def _key(module: str, side: str) -> str:
    return f"{KEY_PREFIX}{module}.lora_{side}.weight"


def _layout(
    targets: Sequence[AdaptedLayer], rank: int
) -> tuple[dict[str, tuple[_Slot, _Slot]], dict[str, _Slot]]:
    """Return the slots of A and B by layer (all experts in one slot), and the slots of tensors by key."""
    pairs: dict[str, tuple[_Slot, _Slot]] = {}
    slots: dict[str, _Slot] = {}
    offset = 0
    for target in targets:
        inner = target.rank(rank)
        pair = []
        for side, shape in (("A", (inner, target.inputs)), ("B", (target.outputs, inner))):
            pair.append(_together(target, side, offset, shape))
            for module in target.modules:
                own = _whole(target.experts, side, shape) if target.whole else shape
                slots[_key(module, side)] = slot = _Slot(offset, own)
                offset = slot.end
        pairs[target.name] = (pair[0], pair[1])
    return pairs, slots


def _together(target: AdaptedLayer, side: str, offset: int, shape: tuple[int, int]) -> _Slot:
    """Return the slot of A or B of a layer; `shape`: of one expert's matrix."""
    if not target.experts:
        return _Slot(offset, shape)
    if target.whole and side == "B":
        return _Slot(offset, (*shape, target.experts), (2, 0, 1))
    return _Slot(offset, (target.experts, *shape))


def _whole(experts: int, side: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the pairs of all experts in PEFT's files: A [E r, in], B [out, r E]."""
    rows, columns = shape
    return (experts * rows, columns) if side == "A" else (rows, columns * experts)


def _seed(seed: int, name: str) -> int:
    """Derive 63 bits from the model's seed and the layer's name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
