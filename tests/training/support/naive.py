"""Tenants, what they ask for, and what a naive trainer makes of it: each tenant alone, one datum at a time.

The naive one computes in float64 with torch's own AdamW and knows no batches, rows, ranks or turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from skyrl_tinker.domain.values import AdamParams, Datum, LoraSpec
from tests.training.support import reference
from tests.training.support.passes import make_data

TENANTS = {
    1: LoraSpec(8, 1),
    2: LoraSpec(4, 2, train_mlp=False, train_attn=False),
    3: LoraSpec(16, 3, train_unembed=False),
    4: LoraSpec(1, 4, train_mlp=False),
    5: LoraSpec(32, 5, train_attn=False, train_unembed=False),
}
WINDOWS = 2
LONGEST = 24
EPS = 1e-3
"""Adam's: with a tiny one it makes a step of full size out of the rounding of a gradient near 0."""


@dataclass(frozen=True)
class Pass:
    data: tuple[Datum, ...]
    loss_fn: str
    backward: bool


Asked = Pass | AdamParams


@dataclass
class Trained:
    """Results of one tenant: by pass, and weights of the new model and after each step."""

    logprobs: list[list[np.ndarray]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: list[Mapping[str, np.ndarray]] = field(default_factory=list)


@cache
def schedule(tenant: int) -> tuple[Asked, ...]:
    """Windows of one to three passes, of any losses, with a step behind each; the last has no gradients."""
    rng = np.random.default_rng(tenant)
    asked: list[Asked] = []
    for window in range(WINDOWS):
        asked += [_pass(rng, window) for _ in range(rng.integers(1, 4))]
        asked.append(_step(rng))
    return (*asked, _pass(rng, WINDOWS, backward=False), _step(rng))


def _pass(rng: np.random.Generator, window: int, *, backward: bool = True) -> Pass:
    loss_fn = str(rng.choice(sorted(reference.LOSSES)))
    lengths = tuple(int(length) for length in rng.integers(1, LONGEST + 1, rng.integers(1, 4)))
    candidates = 3 if loss_fn == "cross_entropy" and window % 2 else 0
    data = make_data(lengths, int(rng.integers(10**6)), loss_fn, candidates)
    return Pass(data, loss_fn, backward and bool(rng.random() < 0.9))


def _step(rng: np.random.Generator) -> AdamParams:
    learning_rate, clip = float(rng.choice([1e-3, 1e-2])), float(rng.choice([0.0, 0.5, 5.0]))
    return AdamParams(learning_rate, eps=EPS, weight_decay=0.1, grad_clip_norm=clip)


class Naive:
    """`adapter`: PEFT names and values of a model that was just made."""

    def __init__(self, directory: str, adapter: Mapping[str, np.ndarray]) -> None:
        self._model = reference.load(directory).double().requires_grad_(False)
        self._leaves = {
            name: torch.tensor(array, dtype=torch.float64).requires_grad_() for name, array in adapter.items()
        }
        self._optimizer = torch.optim.AdamW(self._leaves.values(), betas=(0.9, 0.95), eps=EPS)

    def train(self, asked: Sequence[Asked]) -> Trained:
        trained = Trained(weights=[self._weights()])
        for each in asked:
            if isinstance(each, Pass):
                self._pass(each, trained)
            else:
                self._step(each)
                trained.weights.append(self._weights())
        return trained

    def _pass(self, wanted: Pass, trained: Trained) -> None:
        losses, logprobs = [], []
        for datum in wanted.data:
            merged = reference.merge(self._model, self._leaves)
            logp = reference.logprobs(self._model, datum, merged)
            inputs = {name: torch.tensor(array) for name, array in datum.inputs.items()}
            loss = reference.LOSSES[wanted.loss_fn](logp, inputs)
            if wanted.backward:
                torch.autograd.backward(loss)
            losses.append(loss.item())
            logprobs.append(logp.detach().numpy())
        trained.losses.append(sum(losses))
        trained.logprobs.append(logprobs)

    def _step(self, params: AdamParams) -> None:
        leaves = list(self._leaves.values())
        if all(leaf.grad is None for leaf in leaves):
            return
        if params.grad_clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(leaves, params.grad_clip_norm)
        group = self._optimizer.param_groups[0]
        group["lr"], group["weight_decay"] = params.learning_rate, params.weight_decay
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _weights(self) -> dict[str, np.ndarray]:
        return {name: leaf.detach().numpy().copy() for name, leaf in self._leaves.items()}
