"""Memory of a base model's training by tokens of a row, from profiles of two and three layers.

The peak is the largest of several sums, each linear in layers and in tokens. A layer adds its activations or
its gradients, whichever take more, as backward frees the former while it makes the latter. In tokens the peak
is convex: the line through a short row and the longest one is an upper bound between them.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import torch

from skyrl_tinker.domain.memory_costs import MemoryCosts, RowMemory
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory.row_profile import FakeTrainer, RowProfile, Training
from skyrl_tinker.training.models.logprobs import GPU_CHUNK

_FEW = 2  # layers
_SHORT = GPU_CHUNK  # tokens; in shorter rows, the chunk of logits is not full
_STATE = 16  # bytes for each parameter of an adapter: weight, gradient and two moments, float32


class _Profiles:
    """Profiles of a short and a long row, by `trainers` with few layers and with one more."""

    def __init__(
        self, training: Training, trainers: Sequence[FakeTrainer], tokens: int, *, recompute: bool
    ) -> None:
        self._more = int(training.config["num_hidden_layers"]) - _FEW
        self._full = training.lora.rank == 0
        self._trainers = trainers
        self._rows = [self._measure(length, recompute) for length in (_SHORT, tokens)]

    def _measure(self, tokens: int, recompute: bool) -> list[RowProfile]:
        """Measure a row. Of fewer layers counts what the forward pass leaves, half of the work."""
        few, more = self._trainers
        again = _FEW * recompute
        return [
            few.measure(tokens, recompute=again, backward=False),
            more.measure(tokens, recompute=again + recompute),
        ]

    def parameters(self) -> int:
        few, more = (sum(each.numel() for each in trainer.network.parameters()) for trainer in self._trainers)
        return self._extrapolate(few, more)

    def weights(self) -> int:
        few, more = self._rows[0]
        return self._extrapolate(few.weights, more.weights)

    def state(self) -> int:
        few, more = self._rows[0]
        return self._extrapolate(few.state, more.state)

    def row_memory(self) -> RowMemory:
        return self._line([self._peak(*pair) for pair in self._rows])

    def layer_beyond(self, other: "_Profiles") -> RowMemory:
        """Return what a layer keeps for backward, less what one of the other profiles does."""
        mine, others = ([more.saved - few.saved for few, more in each._rows] for each in (self, other))
        return self._line([a - b for a, b in zip(mine, others, strict=True)])

    def _line(self, sizes: Sequence[int]) -> RowMemory:
        """Return the line through the sizes of the short and the long row."""
        (short, long), (few, most) = (pair[0].tokens for pair in self._rows), sizes
        per_token = (most - few) / (long - short)
        return RowMemory(ceil(few - per_token * short), ceil(per_token), long)

    def _peak(self, few: RowProfile, more: RowProfile) -> int:
        gradients = more.weights - few.weights if self._full else 0  # both float32
        return more.peak + (self._more - 1) * max(more.saved - few.saved, gradients)

    def _extrapolate(self, few: int, more: int) -> int:
        return few + self._more * (more - few)


def measure_costs(training: Training, tokens: int, ranks: Ranks) -> MemoryCosts:
    """Measure one model of `training` on one of `ranks`, with and without recomputation.

    `tokens`: length of the longest row. Raises StartupError for a base model that the trainer does not
    support.
    """
    training = replace(training, tenants=1)
    trainers = [FakeTrainer(training.with_layers(layers), ranks) for layers in (_FEW, _FEW + 1)]
    kept, recomputed = (_Profiles(training, trainers, tokens, recompute=on) for on in (False, True))
    parameters, weights, state = kept.parameters(), kept.weights(), kept.state()
    full = training.lora.rank == 0
    itemsize = getattr(torch, training.dtype).itemsize
    return MemoryCosts(
        parameters=parameters,
        trained=parameters if full else state // _STATE,
        weights=parameters * itemsize // ranks.world if full else weights,
        state=weights + state if full else state,
        kept=kept.row_memory(),
        recomputed=recomputed.row_memory(),
        layer=kept.layer_beyond(recomputed),
        layers=int(training.config["num_hidden_layers"]),
    )
