"""Memory of a row's activations until its backward pass; layers of rows that need too much recompute them."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.memory_costs import RowPeak
from skyrl_tinker.domain.values import Datum, LoraSpec, PassItem
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.batching.packed_row import make_row
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory import allocator
from skyrl_tinker.training.models.logprobs import chunk_tokens
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.network import Network

_LENGTHS = (32, 96)  # of the rows that are measured
_USABLE = 0.8
"""Usable part of the free memory: freed blocks fit the next tensors only in part, and full parameters keep
15 % more than adapters.
"""
_RANK = 8  # of the adapter that is measured
_FLOAT32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """`layers`: bytes per token that each keeps for backward, unless it is recomputed; `others`: all else.

    Measured with an adapter of rank _RANK; `per_rank`: bytes per token for each further rank.
    `inputs`: bytes per token of a layer's input, which it keeps if it is recomputed.
    `gathered`: bytes of whole weights that FSDP gathers from several ranks and holds at one time.
    """

    layers: tuple[float, ...]
    others: float
    inputs: int
    per_rank: int
    gathered: int
    vocab: int
    choice: bool | None  # None: recompute where memory is short, as few layers as will do
    ranks: Ranks

    @classmethod
    def measure(cls, base: Network, choice: bool | None, ranks: Ranks) -> "ActivationMemory":
        """Measure on the device, with an adapter on every layer. All ranks must call it."""
        model = LoraModel(LoraSpec(rank=_RANK, seed=0), base.targets, ranks.device)
        pairs = zip(*(_bytes_kept(base, model, length, ranks) for length in _LENGTHS), strict=True)
        # Without the weights, which both rows keep.
        before, *layers, after = ((long - short) / (_LENGTHS[1] - _LENGTHS[0]) for short, long in pairs)
        config, itemsize = base.causal_lm.config, next(base.parameters()).element_size()
        return cls(
            tuple(layers),
            before + after,
            config.hidden_size * itemsize,
            len(base.targets) * itemsize,  # x A^T of each linear layer
            gathered_bytes(base) if ranks.world > 1 else 0,
            config.vocab_size,
            choice,
            ranks,
        )

    def row(self, tokens: int, rank: int = _RANK) -> RowPeak:
        """Estimate a row's peak in bytes: kept activations, a layer's gradients, a chunk of logits.

        `rank`: adapter columns per token; on a GPU those of all adapters of the row. Of layers that differ,
        each is counted to take away as much as the first ones do on average, where this is least.
        """
        count = len(self.layers)
        adapters = self.per_rank * max(0, rank - _RANK) / count
        layers = [kept + adapters for kept in self.layers]
        least = min(total / number for number, total in enumerate(accumulate(layers), 1))
        head = 3 * _FLOAT32 * min(chunk_tokens(self.ranks.device), tokens) * self.vocab
        always = tokens * (self.others + 2 * max(layers)) + head + self.gathered
        return RowPeak(
            always + tokens * sum(layers),
            always + tokens * (count * self.inputs + max(layers)),
            tokens * (least - self.inputs),
            count,
        )

    def recomputed(self, tokens: int, rank: int) -> int:
        """Count the layers of a row that keep their inputs only, the first ones: as few as let it fit."""
        return self.row(tokens, rank).again_within(_USABLE * allocator.free_bytes(self.ranks), self.choice)

    def most_recomputed(self, tokens: int, rank: int) -> int:
        """Count the layers of a row that keep their inputs only if it is to take as little as possible."""
        return self.row(tokens, rank).again_within(0, self.choice)


def gathered_bytes(base: Network) -> int:
    """Count the bytes of two layers, one of them prefetched, and of all weights outside the layers."""
    whole, layer = (
        sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        for module in (base, base.layers[0])
    )
    return whole - (len(base.layers) - 2) * layer


def _bytes_kept(base: Network, model: LoraModel, length: int, ranks: Ranks) -> list[int]:
    """Count the bytes that autograd holds after a forward pass of one datum.

    Those of storages that it holds first before the first layer, in each layer, and after the last one.
    """
    held: dict[int, torch.UntypedStorage] = {}
    sizes = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            held[storage._cdata] = storage  # alive, so that no other gets its address
            sizes[-1] += storage.nbytes()
        return tensor

    def begin(*_: Any) -> None:
        sizes.append(0)

    tokens = np.zeros(length, np.int32)
    datum = Datum(tokens, tokens.astype(np.int64), {"weights": np.ones(length, np.float32)})
    item = PassItem(RequestId("probe"), ModelKey(0), (datum,), "cross_entropy", {}, backward=True)
    row = make_row(build_batch([item]), (0,), ranks.device)
    hooks = [layer.register_forward_pre_hook(begin) for layer in base.layers]
    hooks.append(base.layers[-1].register_forward_hook(begin))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs = base(row, ((row.models[0], model),), whole_backward=True)
    for hook in hooks:
        hook.remove()
    logprobs.sum().backward()  # type: ignore[no-untyped-call] # which FSDP expects now
    return sizes
