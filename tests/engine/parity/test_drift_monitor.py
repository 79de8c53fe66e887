"""The comparison after a sync tells what it can; what fails in it harms nobody. Both ends are scripted."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from skyrl_tinker.domain.ids import ModelId, ModelKey, VersionId
from skyrl_tinker.domain.values import (
    BaseModelFacts,
    Failure,
    PassItem,
    PassOutput,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    VersionSpan,
    WeightVersion,
)
from skyrl_tinker.engine.parity.drift_monitor import METRIC, DriftMonitor, ScoredProbe
from skyrl_tinker.engine.sampler.inflight_targets import InflightTarget, SampleSource
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import SamplerError, StateLostError, UserError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import PassResult

FACTS = BaseModelFacts("/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))
MODEL = ModelKey(1)
VERSION = WeightVersion(VersionId(3), "full", "/weights/3")
TOKENS = 4


class Ends:
    """Stands for the trainer and the samplers."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.serves = VERSION.name
        self.asked: list[SampleSource] = []
        self.passes = 0
        self.out_of_memory: set[ModelKey] = set()
        self.meanwhile: Callable[[], Awaitable[None]] | None = None  # while the samplers score

    def target(self, model: ModelKey, version: WeightVersion) -> InflightTarget:
        return InflightTarget(model, version)

    async def sample(self, wanted: SampleSource, request: SampleRequest) -> SampleOutput:
        self.asked.append(wanted)
        if self.meanwhile is not None:
            await self.meanwhile()
        if self.error is not None:
            raise self.error
        sequence = SampledSequence((1,), (0.0,), "length", (), (VersionSpan(self.serves, 0, 1),))
        return SampleOutput((sequence,), (float("nan"), *[-1.5] * (TOKENS - 1)))

    def prepare(self, items: Any) -> Any:
        return items

    async def run_pass(self, items: Sequence[PassItem]) -> PassResult:
        self.passes += 1
        return PassResult([self._output(item) for item in items], 2048)

    def _output(self, item: PassItem) -> PassOutput | Failure:
        if item.model in self.out_of_memory:
            return Failure("out of memory", "server")
        return PassOutput(item.request_id, (np.full(TOKENS - 1, -float(item.model), np.float32),), {})


def monitor(store: Store, ends: Ends) -> DriftMonitor:
    parts = cast(Any, ends), cast(Any, ends)
    return DriftMonitor(store, *parts, FACTS, Metrics(), tokens=TOKENS, bound=1.0)


async def scored(gaps: DriftMonitor, model: ModelKey = MODEL) -> ScoredProbe:
    """Its logprobs are minus the model's key; the samplers' are -1.5."""
    (probe,) = await gaps.score({model: ModelId(f"model-{model}")})
    return probe


async def test_the_largest_difference_is_told_once(store: Store) -> None:
    gaps = monitor(store, Ends())
    await gaps.compare(await scored(gaps), VERSION, inflight=False)
    assert gaps.pop_gap(MODEL) == {METRIC: 0.5}
    assert gaps.pop_gap(MODEL) == {}


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
    ends.error = error
    gaps = monitor(store, ends)
    await gaps.compare(await scored(gaps), VERSION, inflight=False)
    assert gaps.pop_gap(MODEL) == {}


async def test_an_inflight_version_is_asked_among_the_rollouts_of_its_target(store: Store) -> None:
    ends = Ends()
    gaps = monitor(store, ends)
    await gaps.compare(await scored(gaps), VERSION, inflight=True)
    assert [type(wanted) for wanted in ends.asked] == [InflightTarget]
    assert gaps.pop_gap(MODEL) == {METRIC: 0.5}
    ends.serves = "v4"
    await gaps.compare(await scored(gaps), VERSION, inflight=True)
    assert gaps.pop_gap(MODEL) == {}, "these were the logprobs of newer weights"


async def test_a_warning_of_a_model_is_over_when_it_is_released(store: Store) -> None:
    gaps = monitor(store, Ends())
    apart, other = await scored(gaps, ModelKey(9)), await scored(gaps, ModelKey(8))
    for each in (apart, other):
        await gaps.compare(each, VERSION, inflight=False)
    await gaps.forget(other.key)
    assert "differ" in str(await warning(store)), "of the other one"
    await gaps.forget(apart.key)
    assert await warning(store) is None
    assert gaps.pop_gap(apart.key) == {}


async def test_a_model_that_is_released_while_it_is_compared_leaves_no_warning(store: Store) -> None:
    ends = Ends()
    gaps = monitor(store, ends)
    apart = await scored(gaps, ModelKey(9))
    ends.meanwhile = lambda: gaps.forget(apart.key)
    await gaps.compare(apart, VERSION, inflight=False)
    assert await warning(store) is None
    assert gaps.pop_gap(apart.key) == {}


async def warning(store: Store) -> object:
    with store.read() as conn:
        return server_state.get(conn, server_state.WARNING)


async def test_a_probe_that_the_trainer_cannot_score_leaves_the_save_alone(store: Store) -> None:
    ends = Ends()
    ends.out_of_memory = {MODEL}
    assert await monitor(store, ends).score({MODEL: ModelId("model")}) == []


async def test_the_probes_of_several_models_share_a_pass(store: Store) -> None:
    """And one that fails is no other's affair."""
    ends, other, bad = Ends(), ModelKey(2), ModelKey(3)
    ends.out_of_memory = {bad}
    models = {key: ModelId(f"model-{key}") for key in (MODEL, bad, other)}
    found = await monitor(store, ends).score(models)
    assert [(each.key, each.logprobs.tolist()) for each in found] == [
        (MODEL, [-1.0] * 3),
        (other, [-2.0] * 3),
    ]
    assert ends.passes == 1
