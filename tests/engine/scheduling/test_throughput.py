"""Trainer time is counted as that of who took it, and estimated from what units took."""

from collections.abc import Mapping, Sequence

import pytest

from skyrl_tinker.domain.ids import ModelKey, RequestKind
from skyrl_tinker.engine.scheduling.row_work import work_of
from skyrl_tinker.engine.scheduling.throughput import LEAST_S, TrainerPace
from skyrl_tinker.store.futures.queue import QueuedRow
from tests.engine.support.rows import queued

NONE: Mapping[int, float] = {}


def passes(*tokens: int, kind: RequestKind = RequestKind.FORWARD_BACKWARD) -> list[QueuedRow]:
    return [queued(n, ModelKey(n), 1, kind, tokens=each) for n, each in enumerate(tokens, 1)]


def attributed(rows: Sequence[QueuedRow], seconds: float, own: Mapping[int, float]) -> list[float]:
    return [taken for _, taken in TrainerPace().attribute(rows, seconds, own)]


def test_a_unit_is_divided_by_tokens() -> None:
    assert attributed(passes(100, 300), 2.0, NONE) == pytest.approx([0.5, 1.5])


def test_what_a_custom_loss_took_is_that_of_its_sender() -> None:
    assert attributed(passes(100, 100), 5.0, {2: 4.0}) == pytest.approx([0.5, 4.5])


def test_no_more_is_attributed_than_was_taken() -> None:
    """As when two ranks work on losses of their own at the same time."""
    assert attributed(passes(100, 100), 4.0, {1: 6.0, 2: 2.0}) == pytest.approx([3.0, 1.0])


def test_nothing_is_free() -> None:
    assert attributed(passes(1, 1_000_000), 1e-3, NONE)[0] == LEAST_S


def test_the_next_unit_is_estimated_by_the_last_without_what_custom_losses_took() -> None:
    pace = TrainerPace()
    for _ in range(20):
        pace.attribute(passes(1000, 1000), 5.0, {1: 3.0})
    backward, forward = passes(1000)[0], passes(1000, kind=RequestKind.FORWARD)[0]
    assert pace.seconds([work_of(backward)]) == pytest.approx(1.0)
    assert pace.seconds([work_of(forward)]) == pytest.approx(1.0 / 3)


def test_steps_are_estimated_by_the_last_ones() -> None:
    pace = TrainerPace()
    steps = [queued(n, ModelKey(n), 1, RequestKind.OPTIM_STEP) for n in (1, 2)]
    assert pace.seconds([RequestKind.OPTIM_STEP]) == LEAST_S
    assert [taken for _, taken in pace.attribute(steps, 0.2, NONE)] == pytest.approx([0.1, 0.1])
    assert pace.seconds([RequestKind.OPTIM_STEP]) == pytest.approx(0.1)
