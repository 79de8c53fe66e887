"""The comparison after a sync tells what it can; what fails in it harms nobody. Both ends are scripted."""

import asyncio
from collections import defaultdict
from typing import Any, cast

import pytest

from skyrl_tinker.domain.ids import ModelId, ModelKey, VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.parity.drift_monitor import METRIC, REPLAY_METRIC, DriftMonitor, ScoredProbe
from skyrl_tinker.engine.parity.warning_board import WarningBoard
from skyrl_tinker.engine.sampler.inflight_targets import InflightTarget
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import SamplerError, StateLostError, UserError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.store import Store
from tests.engine.support.world import FACTS
from tests.support.scripted_samplers import ScriptedSamplers
from tests.support.scripted_trainer import ScriptedTrainer, Trained
from tests.support.waiting import until

MODEL = ModelKey(1)
VERSION = WeightVersion(VersionId(3), "full", "/weights/3")
TOKENS = 4


class Ends:
    """Trainer and samplers; the trainer knows every model."""

    def __init__(self) -> None:
        self.trainer, self.samplers = ScriptedTrainer(defaultdict(Trained)), ScriptedSamplers()
        self.trainer.logprob_of = lambda model: -float(model)


def monitor(store: Store, ends: Ends) -> DriftMonitor:
    parts = cast(Any, ends.trainer), cast(Any, ends.samplers)
    return DriftMonitor(WarningBoard(store), *parts, FACTS, Metrics(), tokens=TOKENS, bound=1.0)


async def scored(gaps: DriftMonitor, model: ModelKey = MODEL) -> ScoredProbe:
    """Its logprobs are minus the model's key; the samplers' are -1.5."""
    (probe,) = await gaps.score({model: ModelId(f"model-{model}")})
    return probe


async def test_the_largest_difference_is_told_once(store: Store) -> None:
    gaps = monitor(store, Ends())
    await gaps.compare(await scored(gaps), VERSION, inflight=False)
    assert gaps.pop_metrics(MODEL) == {METRIC: 0.5}
    assert gaps.pop_metrics(MODEL) == {}


@pytest.mark.parametrize(
    "error",
    [
        UserError("Out of range float values are not JSON compliant"),  # vLLM's answer when they are NaN
        StateLostError("the weights are gone"),
        SamplerError("down"),
        ValueError("an answer that nobody foresaw"),
    ],
)
async def test_what_the_samplers_cannot_score_ends_nothing(store: Store, error: Exception) -> None:
    ends = Ends()
    ends.samplers.failure = error
    gaps = monitor(store, ends)
    await gaps.compare(await scored(gaps), VERSION, inflight=False)
    assert gaps.pop_metrics(MODEL) == {}


async def test_an_inflight_version_is_asked_among_the_rollouts_of_its_target(store: Store) -> None:
    ends = Ends()
    gaps = monitor(store, ends)
    await gaps.compare(await scored(gaps), VERSION, inflight=True)
    assert [type(wanted) for wanted in ends.samplers.sources] == [InflightTarget]
    assert gaps.pop_metrics(MODEL) == {METRIC: 0.5}
    ends.samplers.serves = "v4"
    await gaps.compare(await scored(gaps), VERSION, inflight=True)
    assert gaps.pop_metrics(MODEL) == {}, "these were the logprobs of newer weights"


async def test_a_warning_of_a_model_is_over_when_it_is_released(store: Store) -> None:
    gaps = monitor(store, Ends())
    apart, other = await scored(gaps, ModelKey(9)), await scored(gaps, ModelKey(8))
    for each in (apart, other):
        await gaps.compare(each, VERSION, inflight=False)
    assert "logprobs of model-9 differ" in str(await warning(store))
    await gaps.forget(apart.key)
    assert "logprobs of model-8 differ" in str(await warning(store))
    await gaps.forget(other.key)
    assert await warning(store) is None
    assert gaps.pop_metrics(apart.key) == {}


async def test_a_replay_that_differed_is_told_once_and_forgotten_with_its_model(store: Store) -> None:
    gaps = monitor(store, Ends())
    gaps.note_replay(MODEL)
    assert gaps.pop_metrics(MODEL) == {REPLAY_METRIC: 1.0}
    assert gaps.pop_metrics(MODEL) == {}
    gaps.note_replay(MODEL)
    await gaps.forget(MODEL)
    assert gaps.pop_metrics(MODEL) == {}


async def test_a_model_that_is_released_while_it_is_compared_leaves_no_warning(store: Store) -> None:
    ends = Ends()
    gaps = monitor(store, ends)
    apart = await scored(gaps, ModelKey(9))
    ends.samplers.go_on.clear()
    comparing = asyncio.create_task(gaps.compare(apart, VERSION, inflight=False))
    await until(lambda: ends.samplers.sources)
    await gaps.forget(apart.key)
    ends.samplers.go_on.set()
    await comparing
    assert await warning(store) is None
    assert gaps.pop_metrics(apart.key) == {}


async def warning(store: Store) -> object:
    return await store.read(lambda conn: server_state.get(conn, server_state.WARNING))


async def test_a_probe_that_the_trainer_cannot_score_leaves_the_save_alone(store: Store) -> None:
    ends = Ends()
    ends.trainer.large = {MODEL}
    assert await monitor(store, ends).score({MODEL: ModelId("model")}) == []


async def test_the_probes_of_several_models_share_a_pass(store: Store) -> None:
    """And one that fails is no other's affair."""
    ends, other, bad = Ends(), ModelKey(2), ModelKey(3)
    ends.trainer.trained = {MODEL: Trained(), other: Trained()}
    models = {key: ModelId(f"model-{key}") for key in (MODEL, bad, other)}
    found = await monitor(store, ends).score(models)
    assert [(each.key, each.logprobs.tolist()) for each in found] == [
        (MODEL, [-1.0] * 3),
        (other, [-2.0] * 3),
    ]
    assert len(ends.trainer.asked("pass")) == 1
