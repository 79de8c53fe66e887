"""The comparison after a sync tells what it can; what fails in it harms nobody. Both ends are scripted."""

from typing import Any, cast

import numpy as np
import pytest

from skyrl_tinker.engine.gap import METRIC, GapMonitor, Scored
from skyrl_tinker.engine.inflight import Target, Wanted
from skyrl_tinker.engine.metrics import Metrics
from skyrl_tinker.errors import SamplerError, StateLostError, UserError
from skyrl_tinker.store.store import Store
from skyrl_tinker.wire.ids import ModelId, ModelKey, VersionId
from skyrl_tinker.wire.values import (
    BaseModelFacts,
    Failure,
    PassOutput,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    VersionSpan,
    WeightVersion,
)

FACTS = BaseModelFacts("/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))
MODEL = ModelKey(1)
VERSION = WeightVersion(VersionId(3), "full", "/weights/3")
TOKENS = 4


class Ends:
    """Stands for the trainer and the samplers."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.serves = VERSION.name
        self.asked: list[Wanted] = []

    def target(self, model: ModelKey, version: WeightVersion) -> Target:
        return Target(model, version)

    async def sample(self, wanted: Wanted, request: SampleRequest) -> SampleOutput:
        self.asked.append(wanted)
        if self.error is not None:
            raise self.error
        sequence = SampledSequence((1,), (0.0,), "length", (), (VersionSpan(self.serves, 0, 1),))
        return SampleOutput((sequence,), (float("nan"), *[-1.5] * (TOKENS - 1)))

    def prepare(self, items: Any) -> Any:
        return items

    async def run_pass(self, items: Any) -> list[PassOutput | Failure]:
        return [Failure("out of memory", "server")]


def monitor(store: Store, ends: Ends) -> GapMonitor:
    parts = cast(Any, ends), cast(Any, ends)
    return GapMonitor(store, *parts, FACTS, Metrics(), tokens=TOKENS, bound=1.0)


def scored() -> Scored:
    return Scored(MODEL, ModelId("model"), np.full(TOKENS - 1, -1.0, np.float32))


async def test_the_largest_difference_is_told_once(store: Store) -> None:
    gaps = monitor(store, Ends())
    await gaps.compare(scored(), VERSION, inflight=False)
    assert gaps.take(MODEL) == {METRIC: 0.5}
    assert gaps.take(MODEL) == {}


@pytest.mark.parametrize(
    "error",
    [
        UserError("Out of range float values are not JSON compliant"),  # vLLM's answer when they are NaN
        StateLostError("the weights are gone"),
        SamplerError("down"),
    ],
)
async def test_what_the_samplers_cannot_score_ends_nothing(store: Store, error: Exception) -> None:
    ends = Ends()
    ends.error = error
    gaps = monitor(store, ends)
    await gaps.compare(scored(), VERSION, inflight=False)
    assert gaps.take(MODEL) == {}


async def test_an_inflight_version_is_asked_among_the_rollouts_of_its_target(store: Store) -> None:
    ends = Ends()
    gaps = monitor(store, ends)
    await gaps.compare(scored(), VERSION, inflight=True)
    assert [type(wanted) for wanted in ends.asked] == [Target]
    assert gaps.take(MODEL) == {METRIC: 0.5}
    ends.serves = "v4"
    await gaps.compare(scored(), VERSION, inflight=True)
    assert gaps.take(MODEL) == {}, "these were the logprobs of newer weights"


async def test_a_probe_that_the_trainer_cannot_score_leaves_the_save_alone(store: Store) -> None:
    assert await monitor(store, Ends()).score(MODEL, ModelId("model")) is None
