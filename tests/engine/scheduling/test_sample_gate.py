"""Requests before the gate of a base model: they pass, wait or fail, and are its use."""

import asyncio

import pytest

from skyrl_tinker.engine.scheduling.sample_gate import SampleGate
from skyrl_tinker.errors import SamplerError
from tests.support.waiting import until


async def _use(gate: SampleGate, inside: asyncio.Event, leave: asyncio.Event) -> None:
    async with gate.passage():
        inside.set()
        await leave.wait()


async def test_a_request_that_waits_or_is_inside_is_a_use_and_only_one_that_waits_asks() -> None:
    gate, inside, leave = SampleGate(), asyncio.Event(), asyncio.Event()
    gate._left_at -= 60.0
    assert gate.idle_s >= 60.0
    gate.close("it starts")
    using = asyncio.create_task(_use(gate, inside, leave))
    await gate.asked.wait()
    assert (gate.in_use, gate.idle_s, inside.is_set()) == (True, 0.0, False)
    gate.asked.clear()
    gate.open()
    await inside.wait()
    assert (gate.in_use, gate.idle_s, gate.asked.is_set()) == (True, 0.0, False)
    leave.set()
    await using
    assert not gate.in_use
    assert 0.0 <= gate.idle_s < 60.0
    await _use(gate, inside, leave)
    assert not gate.asked.is_set()


async def test_a_request_that_is_cancelled_or_refused_is_no_use_any_more() -> None:
    gate, never = SampleGate(), asyncio.Event()
    gate.close("it starts")
    using = asyncio.create_task(_use(gate, never, never))
    await gate.asked.wait()
    using.cancel()
    await until(using.done)
    assert not gate.in_use
    gate.close("it does not start", refuses=True)
    with pytest.raises(SamplerError, match="it does not start"):
        await _use(gate, never, never)
    assert not gate.in_use


async def test_it_is_not_idle_of_old_when_it_opens() -> None:
    gate = SampleGate()
    gate.close("it is stopped")
    gate._left_at -= 60.0
    gate.open()
    assert gate.idle_s < 60.0
