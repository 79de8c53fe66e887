"""Drift monitor: after every sync, compares the samplers' logprobs of a probe with the trainer's."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from skyrl_tinker.domain.ids import ModelId, ModelKey
from skyrl_tinker.domain.values import BaseModelFacts, Failure, Float32, WeightVersion
from skyrl_tinker.engine.parity.probe import (
    largest_difference,
    probe_tokens,
    sampler_logprobs,
    trainer_logprobs,
)
from skyrl_tinker.engine.parity.warning_board import WarningBoard
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import SkyrlTinkerError, TrainerError
from skyrl_tinker.training.trainer_group import TrainerGroup

METRIC, REPLAY_METRIC = "sampler_logprob_gap", "replay_differed"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScoredProbe:
    """Probe of a model, scored by the trainer with the weights being published: logprobs [tokens - 1]."""

    key: ModelKey
    model_id: ModelId
    logprobs: Float32


class DriftMonitor:
    """Scores on the trainer during the save, and on the samplers after the save has its result."""

    def __init__(
        self,
        warnings: WarningBoard,
        trainer: TrainerGroup,
        samplers: Samplers | None,
        facts: BaseModelFacts,
        metrics: Metrics,
        *,
        tokens: int,
        bound: float,
    ) -> None:
        """`samplers` None: nothing is compared. `tokens`: length of the probe, below 2 = off."""
        self._warnings = warnings
        self._trainer = trainer
        self._samplers = samplers
        self._compared = partial(metrics.compared, facts.name)
        self._tokens = probe_tokens(facts, tokens)
        self._bound = bound
        self._gaps: dict[ModelKey, float] = {}  # by model, not reported yet
        self._differed: set[ModelKey] = set()  # not reported yet: models whose replay gave other logprobs
        self._scored: set[ModelKey] = set()  # models with a scored probe, until `forget`

    async def score(self, models: Mapping[ModelKey, ModelId]) -> list[ScoredProbe]:
        """Score the probe of all models in one pass; failed ones are left out, so that their saves go on."""
        if self._samplers is None or len(self._tokens) < 2 or not models:
            return []
        try:
            outputs = await trainer_logprobs(self._trainer, list(models), self._tokens)
        except TrainerError as error:  # the next unit finds the ranks broken, too
            _log.info("the probe was not scored: %s", error)
            return []
        scored = []
        for (key, model_id), output in zip(models.items(), outputs, strict=True):
            if isinstance(output, Failure):
                _log.warning("the probe of %s failed: %s", model_id, output.message)
            else:
                scored.append(ScoredProbe(key, model_id, output))
                self._scored.add(key)
        return scored

    async def compare(self, scored: ScoredProbe, version: WeightVersion, *, inflight: bool) -> None:
        """Compare with the samplers; report the gap in the metrics, the model's next step and a warning.

        An inflight version is sampled through its target, like rollouts, so that no rollout is interrupted.
        """
        samplers = self._samplers
        assert samplers is not None, "scored for samplers alone"
        target = samplers.target(scored.key, version) if inflight else version
        try:
            sampled, served = await sampler_logprobs(samplers, target, self._tokens)
            gap = largest_difference(sampled, scored.logprobs)
        except SkyrlTinkerError as error:  # dropped meanwhile, samplers down, or NaN logprobs
            _log.info("the logprobs of %s were not compared: %s", version.name, error)
            return
        except Exception:  # an external sampler may answer anything, and a diagnostic must not end the engine
            _log.exception("the logprobs of %s were not compared", version.name)
            return
        if inflight and served != version.name:  # the target has moved on, and is compared again
            return
        if scored.key not in self._scored:  # released meanwhile
            return
        self._compared(gap)
        self._gaps[scored.key] = float(np.maximum(gap, self._gaps.get(scored.key, 0.0)))  # NaN if one is
        await self._judge(scored, gap)

    def note_replay(self, model: ModelKey) -> None:
        """Record that a model's replay gave logprobs other than those delivered."""
        self._differed.add(model)

    def pop_metrics(self, model: ModelKey) -> dict[str, float]:
        """Return metrics for a step: the largest gap, and whether a replay differed, since the last call."""
        gap = {METRIC: self._gaps.pop(model)} if model in self._gaps else {}
        differed = {REPLAY_METRIC: 1.0} if model in self._differed else {}
        self._differed.discard(model)
        return gap | differed

    async def forget(self, model: ModelKey) -> None:
        """Forget a model that has left the ranks, and withdraw its warning."""
        self._gaps.pop(model, None)
        self._differed.discard(model)
        self._scored.discard(model)
        await self._warnings.withdraw(model)

    async def _judge(self, scored: ScoredProbe, gap: float) -> None:
        """Keep a warning in the store while any model's gap is beyond the bound."""
        if gap <= self._bound:  # false for NaN
            await self._warnings.withdraw(scored.key)
            return
        warning = (
            f"the sampler's logprobs of {scored.model_id} differ from the trainer's by {gap:.1e}, "
            f"allowed {self._bound:.0e} (parity.gap_bound): importance ratios start away from 1"
        )
        _log.warning("%s", warning)
        await self._warnings.warn(scored.key, warning)
