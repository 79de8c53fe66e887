"""After every sync: do the samplers give a model's tokens the logprobs that the trainer gave them?"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_tinker.domain.ids import ModelId, ModelKey
from skyrl_tinker.domain.values import BaseModelFacts, Failure, Float32, WeightVersion
from skyrl_tinker.engine.engine_metrics import Metrics
from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.engine.parity.probe import (
    largest_difference,
    probe_tokens,
    sampler_logprobs,
    trainer_logprobs,
)
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup

METRIC = "sampler_logprob_gap"
BOUNDS = {"float32": 1e-3, "bfloat16": 0.25}
"""Of the trainer's dtype: bfloat16 alone moves logprobs by 0.02 to 0.12."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScoredProbe:
    """A model's probe as the trainer scored it, [tokens - 1], with the weights that are being published."""

    key: ModelKey
    model_id: ModelId
    logprobs: Float32


class DriftMonitor:
    """The trainer's half runs in the turn of the save; the samplers' half after the save is answered."""

    def __init__(
        self,
        store: Store,
        trainer: TrainerGroup,
        samplers: Samplers,
        facts: BaseModelFacts,
        metrics: Metrics,
        *,
        tokens: int,
        bound: float,
    ) -> None:
        """`tokens`: length of the probe, below 2 = off."""
        self._store = store
        self._trainer = trainer
        self._samplers = samplers
        self._metrics = metrics
        self._tokens = probe_tokens(facts, tokens)
        self._bound = bound
        self._news: dict[ModelKey, float] = {}
        self._apart: set[ModelKey] = set()

    async def begin(self) -> None:
        """What an earlier engine warned of is over."""
        await self._warn(None)

    async def score(self, models: Mapping[ModelKey, ModelId]) -> list[ScoredProbe]:
        """All in one pass. Those whose probe failed are left out: it must not fail their save."""
        if len(self._tokens) < 2 or not models:
            return []
        outputs = await trainer_logprobs(self._trainer, list(models), self._tokens)
        scored = []
        for (key, model_id), output in zip(models.items(), outputs, strict=True):
            if isinstance(output, Failure):
                _log.warning("the probe of %s failed: %s", model_id, output.message)
            else:
                scored.append(ScoredProbe(key, model_id, output))
        return scored

    async def compare(self, scored: ScoredProbe, version: WeightVersion, *, inflight: bool) -> None:
        """Ask the samplers, and tell: the metrics, the model's next step, and beyond the bound the user.

        An inflight version is asked as those ask who sample it: nobody's rollouts make room for the probe.
        """
        wanted = self._samplers.target(scored.key, version) if inflight else version
        try:
            sampled, served = await sampler_logprobs(self._samplers, wanted, self._tokens)
        except SkyrlTinkerError as error:  # dropped meanwhile, samplers down, or logprobs that are no numbers
            _log.info("the logprobs of %s were not compared: %s", version.name, error)
            return
        if inflight and served != version.name:  # the target has moved on, and is compared again
            return
        gap = largest_difference(sampled, scored.logprobs)
        self._metrics.compared(gap)
        self._news[scored.key] = _worse(gap, self._news.get(scored.key, 0.0))
        await self._judge(scored, gap)

    def take(self, model: ModelKey) -> dict[str, float]:
        """What a step's metrics tell: the largest gap that nobody was told of yet."""
        return {METRIC: self._news.pop(model)} if model in self._news else {}

    async def forget(self, model: ModelKey) -> None:
        """It is released: nobody asks any more, and what it was warned of is over."""
        self._news.pop(model, None)
        await self._agrees(model)

    async def _judge(self, scored: ScoredProbe, gap: float) -> None:
        """The store keeps a warning from the first model that is apart until the last one agrees again."""
        if gap <= self._bound:  # false for NaN
            await self._agrees(scored.key)
            return
        warning = (
            f"the sampler's logprobs of {scored.model_id} differ from the trainer's by {gap:.1e}, "
            f"allowed {self._bound:.0e} (logprob_gap_bound): importance ratios start away from 1"
        )
        _log.warning("%s", warning)
        first = not self._apart
        self._apart.add(scored.key)
        if first:
            await persistently(lambda: self._warn(warning))

    async def _agrees(self, model: ModelKey) -> None:
        if model not in self._apart:
            return
        self._apart.discard(model)
        if not self._apart:
            await persistently(lambda: self._warn(None))

    async def _warn(self, warning: str | None) -> None:
        await self._store.write(lambda conn: server_state.put(conn, server_state.WARNING, warning))


def _worse(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)
