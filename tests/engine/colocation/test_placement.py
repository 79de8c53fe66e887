"""Trainer and samplers take turns on their devices: one at a time, within limits, and only if needed."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_tinker.config import Phases
from skyrl_tinker.engine.colocation.phases import IDLE_S, PhaseState, PhaseView, due_in
from skyrl_tinker.engine.colocation.placement import AwakeLock, Colocated, Placement
from tests.engine.support.simulation import now, simulated

LIMITS = Phases(min_s=0.2, max_s=10.0)
SLICE_S = 0.01
SLACK_S = 0.01


class Devices:
    """Trainer and samplers that note where they are; both at once would not fit."""

    def __init__(self, switch_s: float = 0.5, limits: Phases = LIMITS) -> None:
        self.switch_s = switch_s
        self.awake, self.weights_awake, self.onloaded = True, True, False
        self.updated_asleep: list[bool] = []
        self.waits: dict[PhaseState, list[float]] = {PhaseState.TRAINING: [], PhaseState.SAMPLING: []}
        self.placement = Colocated(self, limits, now)
        self.changing = AwakeLock(self.placement)

    async def offload(self) -> None:
        await self._move()
        self.onloaded = False

    async def onload(self) -> None:
        assert not self.awake
        self.onloaded = True
        await self._move()

    async def sleep(self) -> None:
        await asyncio.sleep(self.switch_s / 2)
        self.awake = self.weights_awake = False

    async def wake_weights(self) -> None:
        assert not self.onloaded
        await asyncio.sleep(self.switch_s / 4)
        self.weights_awake = True

    async def wake_caches(self) -> None:
        assert self.weights_awake
        self.awake = True
        await asyncio.sleep(self.switch_s / 4)

    async def _move(self) -> None:
        await asyncio.sleep(self.switch_s / 2)

    async def unit(self, seconds: float) -> None:
        asked = now()
        async with self.placement.training():
            self.waits[PhaseState.TRAINING].append(now() - asked)
            assert (self.onloaded, self.awake) == (True, False)
            await asyncio.sleep(seconds)
            assert (self.onloaded, self.awake) == (True, False)

    async def change(self, seconds: float) -> None:
        async with self.changing.hold():
            before = self.switches
            await asyncio.sleep(seconds)
            assert (self.onloaded, self.awake) == (False, True)
            assert self.switches == before, "put to sleep half done"

    async def update(self, seconds: float) -> None:
        async with self.changing.updating() as awake:
            self.updated_asleep.append(not awake)
            for _ in range(2):
                assert (self.onloaded, self.weights_awake, self.awake) == (False, True, awake)
                await asyncio.sleep(seconds / 2)
            assert self.awake == awake, "requests went on in the middle of it"

    async def sample(self, seconds: float) -> None:
        """Makes progress only while awake."""
        asked = now()
        async with self.placement.sampling():
            self.waits[PhaseState.SAMPLING].append(now() - asked)
            while seconds > 0:
                await asyncio.sleep(SLICE_S)
                seconds -= SLICE_S if self.awake else 0

    @property
    def switches(self) -> int:
        return sum(
            self.placement.totals[state].count for state in (PhaseState.TO_TRAINING, PhaseState.TO_SAMPLING)
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            turns = tasks.create_task(self.placement.run(self))
            yield
            turns.cancel()


# The policy


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (PhaseView(lasted=99, idle=99, waited=None), math.inf),  # nobody waits: there is no reason to go
        (
            PhaseView(lasted=99, idle=1, waited=0),
            IDLE_S - 1,
        ),  # idle for longer than a client's round trip: now
        (PhaseView(lasted=99, idle=0, waited=0), IDLE_S),
        (PhaseView(lasted=0.1, idle=1, waited=0), 0.1),  # but not before the phase paid for its switch
        (PhaseView(lasted=3, idle=None, waited=3), 7),  # busy: as long as the other side's patience lasts
        (PhaseView(lasted=3, idle=None, waited=12), -2),
        (PhaseView(lasted=0.05, idle=None, waited=12), 0.15),
        (PhaseView(lasted=99, idle=0, waited=12), -2),  # patience is over: no round trip more
    ],
)
def test_a_phase_ends_when(view: PhaseView, expected: float) -> None:
    assert due_in(view, LIMITS) == pytest.approx(expected)


times = st.floats(0, 1e4)


@given(times, times | st.none(), times, times, times)
def test_patience_has_an_end_whatever_the_backlog(
    lasted: float, idle: float | None, waited: float, min_s: float, max_s: float
) -> None:
    due = due_in(PhaseView(lasted, idle, waited), Phases.model_construct(min_s=min_s, max_s=max_s))
    assert due <= max(min_s, max_s, IDLE_S)
    assert due >= min_s - lasted


# Phases on a simulated clock

durations = st.floats(0.01, 5)
gaps = st.floats(0, 3)
jobs = st.lists(st.tuples(gaps, durations), max_size=8)


@settings(max_examples=150)
@given(jobs, jobs, jobs, st.lists(jobs, max_size=3), st.floats(0.01, 1), st.floats(0.01, 4), st.floats(0, 3))
@simulated
async def test_one_side_at_a_time_and_nobody_starves(
    units: list[tuple[float, float]],
    changes: list[tuple[float, float]],
    updates: list[tuple[float, float]],
    clients: list[list[tuple[float, float]]],
    min_s: float,
    max_s: float,
    switch_s: float,
) -> None:
    devices = Devices(switch_s, Phases.model_construct(min_s=min_s, max_s=max_s))

    async def in_turn(what, jobs) -> None:  # type: ignore[no-untyped-def]
        for gap, seconds in jobs:
            await asyncio.sleep(gap)
            await what(seconds)

    async with devices.running(), asyncio.TaskGroup() as tasks:
        tasks.create_task(in_turn(devices.unit, units))
        tasks.create_task(in_turn(devices.change, changes))
        tasks.create_task(in_turn(devices.update, updates))
        for client in clients:
            tasks.create_task(in_turn(devices.sample, client))
    longest = max((seconds for _, seconds in (*units, *changes)), default=0.0)
    longest += sum(seconds for _, seconds in updates)  # those that follow one another come before caches wake
    bound = max(min_s, max_s, IDLE_S) + longest + 2 * switch_s + SLACK_S
    assert all(wait <= bound for waits in devices.waits.values() for wait in waits)
    assert len(devices.waits[PhaseState.TRAINING]) == len(units)


@simulated
async def test_a_long_generation_stands_still_and_goes_on() -> None:
    devices = Devices()
    async with devices.running():
        sample = asyncio.create_task(devices.sample(30.0))
        await asyncio.sleep(1)
        await devices.unit(5.0)
        assert not sample.done()
        await sample
    totals = devices.placement.totals
    assert totals[PhaseState.TO_TRAINING].count == totals[PhaseState.TO_SAMPLING].count == 1
    assert totals[PhaseState.TRAINING].seconds == pytest.approx(5.0 + IDLE_S, abs=0.02)
    assert devices.waits[PhaseState.TRAINING] == [pytest.approx(LIMITS.max_s + devices.switch_s, abs=0.02)]


@simulated
async def test_a_client_that_answers_at_once_costs_no_switch() -> None:
    devices = Devices()
    async with devices.running():
        flood = [asyncio.create_task(devices.sample(40.0)) for _ in range(20)]
        for _ in range(50):  # forward_backward, look at the result, optim_step
            await devices.unit(0.1)
            await asyncio.sleep(IDLE_S / 2)
        await asyncio.gather(*flood)
    assert devices.switches == 2


@simulated
async def test_both_sides_flooded_share_the_time() -> None:
    devices = Devices(limits=Phases(min_s=0.2, max_s=3.0))
    async with devices.running():
        flood = [asyncio.create_task(devices.sample(60.0)) for _ in range(4)]
        while not all(each.done() for each in flood):
            await devices.unit(0.5)
    totals = devices.placement.totals
    assert 0.7 < totals[PhaseState.SAMPLING].seconds / totals[PhaseState.TRAINING].seconds < 1.4
    assert totals[PhaseState.TRAINING].seconds / totals[PhaseState.TRAINING].count == pytest.approx(
        3.0, abs=0.6
    )


@simulated
async def test_weights_that_wait_are_replaced_before_the_caches_wake() -> None:
    devices = Devices()
    async with devices.running():
        sample = asyncio.create_task(devices.sample(30.0))
        await devices.update(1.0)
        unit = asyncio.create_task(devices.unit(5.0))
        await asyncio.sleep(LIMITS.max_s + 2)
        assert devices.placement.state is PhaseState.TRAINING
        await devices.update(1.0)
        assert not devices.awake
        await asyncio.gather(sample, unit)
    assert devices.updated_asleep == [False, True]


@simulated
async def test_a_steady_stream_of_changes_lets_the_trainer_in() -> None:
    devices = Devices()

    async def stream() -> None:
        while True:
            await devices.change(0.5)

    async with devices.running():
        streams = [asyncio.create_task(stream()) for _ in range(3)]
        await asyncio.sleep(1)
        await devices.unit(1.0)
        for each in streams:
            each.cancel()
        await asyncio.wait(streams)
    assert devices.waits[PhaseState.TRAINING][0] <= LIMITS.max_s + 0.5 + devices.switch_s + SLACK_S


@simulated
async def test_who_gives_up_waiting_leaves_no_trace() -> None:
    devices = Devices()
    async with devices.running():
        sample = asyncio.create_task(devices.sample(100.0))
        await asyncio.sleep(1)
        waiting = asyncio.create_task(devices.unit(1.0))
        await asyncio.sleep(LIMITS.max_s + devices.switch_s - 0.001)  # the switch is nearly over
        waiting.cancel()
        await sample
        await devices.unit(1.0)
    assert len(devices.waits[PhaseState.TRAINING]) == 1


@simulated
async def test_fresh_processes_begin_with_the_samplers_phase_whenever_the_last_ones_ended() -> None:
    devices = Devices()
    async with devices.running():
        await devices.unit(1.0)
    assert devices.placement.state is PhaseState.SAMPLING
    devices.awake, devices.weights_awake, devices.onloaded = True, True, False
    await devices.sample(1.0)
    async with devices.running():
        await devices.unit(1.0)


async def test_separate_parts_never_wait() -> None:
    placement = Placement()
    async with placement.training(), placement.sampling(), placement.awake(), AwakeLock(placement).hold():
        await placement.run(Devices())
    async with placement.updating() as awake:
        assert awake
    assert not placement.totals
