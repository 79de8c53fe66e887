"""Why no sample gets on is known to those who ask for them."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from skyrl_tinker.domain.ids import VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.colocation.placement import SEPARATE, Placement
from skyrl_tinker.engine.sampler.adapter_cache import AdapterLimits
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.scheduling.throughput import EndRate, UnitTimes
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from tests.engine.colocation.test_placement import Devices
from tests.engine.sampler.test_sampler_driver import FACTS
from tests.engine.support.simulation import simulated
from tests.support.sampler_clients import opened_fleet, vllm_client
from tests.support.waiting import until

NOTHING = cast(Any, None)


def samplers_on(*urls: str, placement: Placement = SEPARATE) -> Samplers:
    client = vllm_client(urls[0] if urls else "", urls)
    return Samplers(opened_fleet(client, placement=placement), NOTHING, FACTS, AdapterLimits(8, 8), Metrics())


def test_nobody_serves() -> None:
    assert samplers_on().paused == "no sampler is running: they are being restarted"
    assert samplers_on("http://127.0.0.1:1").paused is None


async def test_weights_are_on_their_way(tmp_path: Path) -> None:
    samplers = samplers_on("http://127.0.0.1:1")
    version = WeightVersion(VersionId(1), "full", str(tmp_path))
    async with samplers.fleet.changing.hold():  # so that they have to wait
        swap = asyncio.create_task(samplers.announce(version))
        await until(lambda: samplers.paused == "samplers are updating weights")
    await asyncio.wait((swap,))
    assert swap.exception() is not None  # nothing carries weights here
    assert samplers.paused is None


@simulated
async def test_the_trainer_has_its_turn() -> None:
    devices = Devices()
    samplers = samplers_on("http://127.0.0.1:1", placement=devices.placement)
    turns = asyncio.create_task(devices.placement.run(devices))
    assert samplers.paused is None
    async with devices.placement.training():
        assert samplers.paused == "the trainer is using the samplers' devices"
    async with devices.placement.sampling():
        assert samplers.paused is None
    turns.cancel()


def test_without_a_measurement_there_is_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace, ends = UnitTimes(), EndRate()
    assert (pace.seconds(), ends.per_second()) == (None, None)
    with pace.unit(()):
        now += 0.05
    for _ in range(5):
        ends.record()
        now += 0.01
    assert pace.seconds() == pytest.approx(0.05)
    assert ends.per_second() == pytest.approx(100)
