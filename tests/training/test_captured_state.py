"""Bound of captured state."""

import asyncio

import pytest

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.training.captured_state import CapturedBytes

MODEL = ModelKey(1)


@pytest.fixture
def captured() -> CapturedBytes:
    captured = CapturedBytes()
    captured.most = 10
    captured.know(MODEL, 2, 6)
    return captured


def test_as_many_are_captured_as_fit_and_any_one_alone(captured: CapturedBytes) -> None:
    assert captured.fitting([4, 6, 4]) == 2
    assert captured.fitting([11, 4]) == 1
    captured.take(7, 4)
    assert captured.held == 4
    assert captured.fitting([6, 4]) == 1
    assert captured.fitting([11, 4]) == 0, "none passes it"


def test_a_capture_counts_with_the_moments_that_it_has(captured: CapturedBytes) -> None:
    assert captured.size(MODEL, optimizer=True) == 6
    assert captured.size(MODEL, optimizer=False) == 2
    captured.forget(MODEL)
    assert captured.size(MODEL, optimizer=True) == 0


async def test_what_is_freed_wakes_who_waits(captured: CapturedBytes) -> None:
    await captured.next_free().wait()
    captured.take(7, 4)
    waiting = asyncio.create_task(captured.next_free().wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    late = captured.next_free()
    captured.free(7)
    await waiting
    await late.wait()
    captured.free(7)
    assert captured.held == 0
