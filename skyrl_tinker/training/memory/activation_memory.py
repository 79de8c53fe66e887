"""Memory of a row's activations until its backward pass; rows that need too much recompute them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from skyrl_tinker.domain.ids import ModelKey, RequestId
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
    """`kept`: bytes per token that all layers together keep for backward, unless they are recomputed.

    Measured with an adapter of rank _RANK; `per_rank`: bytes per token for each further rank.
    `gathered`: bytes of whole weights that FSDP gathers from several ranks and holds at one time.
    """

    kept: float
    per_rank: int
    gathered: int
    layers: int
    vocab: int
    choice: bool | None  # None: recompute where memory is short
    ranks: Ranks

    @classmethod
    def measure(cls, base: Network, choice: bool | None, ranks: Ranks) -> "ActivationMemory":
        """Measure on the device, with an adapter on every layer. All ranks must call it."""
        model = LoraModel(LoraSpec(rank=_RANK, seed=0), base.targets, ranks.device)
        short, long = (_bytes_kept(base, model, length, ranks) for length in _LENGTHS)
        kept = (long - short) / (_LENGTHS[1] - _LENGTHS[0])  # without the weights, which both rows keep
        per_rank = len(base.targets) * next(base.parameters()).element_size()  # x A^T of each layer
        gathered = gathered_bytes(base) if ranks.world > 1 else 0
        return cls(
            kept, per_rank, gathered, len(base.layers), base.causal_lm.config.vocab_size, choice, ranks
        )

    def row_bytes(self, tokens: int, rank: int = _RANK) -> float:
        """Estimate a row's peak in bytes: kept activations, a layer's gradients, a chunk of logits.

        `rank`: adapter columns per token; on a GPU those of all adapters of the row.
        """
        kept = self.kept + self.per_rank * max(0, rank - _RANK)
        head = 3 * _FLOAT32 * min(chunk_tokens(self.ranks.device), tokens) * self.vocab
        return tokens * kept * (1 + 2 / self.layers) + head + self.gathered

    def recomputed(self, tokens: int, rank: int) -> bool:
        """Decide whether the layers of a row keep their inputs only."""
        if self.choice is not None:
            return self.choice
        return self.row_bytes(tokens, rank) > _USABLE * allocator.free_bytes(self.ranks)


def gathered_bytes(base: Network) -> int:
    """Count the bytes of two layers, one of them prefetched, and of all weights outside the layers."""
    whole, layer = (
        sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        for module in (base, base.layers[0])
    )
    return whole - (len(base.layers) - 2) * layer


def _bytes_kept(base: Network, model: LoraModel, length: int, ranks: Ranks) -> int:
    """Count the bytes that autograd holds after a forward pass of one datum."""
    held: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage._cdata] = storage.nbytes(), storage  # alive, so that no other gets its address
        return tensor

    tokens = np.zeros(length, np.int32)
    datum = Datum(tokens, tokens.astype(np.int64), {"weights": np.ones(length, np.float32)})
    item = PassItem(RequestId("probe"), ModelKey(0), (datum,), "cross_entropy", {}, backward=True)
    row = make_row(build_batch([item]), (0,), ranks.device)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs = base(row, ((row.models[0], model),), whole_backward=True)
    total = sum(size for size, _ in held.values())
    logprobs.sum().backward()  # type: ignore[no-untyped-call] # which FSDP expects now
    return total
