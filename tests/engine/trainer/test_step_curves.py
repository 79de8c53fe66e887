"""Points of curves against sums written out here, and where the windows of models end."""

import math
from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import select

from skyrl_tinker.domain.ids import ModelId, ModelKey, RequestId
from skyrl_tinker.domain.values import Datum, ForwardBackward, PassOutput
from skyrl_tinker.engine.trainer import step_curves
from skyrl_tinker.engine.trainer.step_curves import PassSums, StepCurves, TakenStep, sums_of
from skyrl_tinker.store.console import step_points
from skyrl_tinker.store.console.step_points import Point
from skyrl_tinker.store.database.tables import StepPoint
from skyrl_tinker.store.store import Store
from tests.engine.support import journal
from tests.engine.support.rows import queued
from tests.support.reads import reading
from tests.support.skew import skew

LOGPROBS = ([-0.5, -1.0, -2.0], [-4.0])


def request(loss_fn: str, *inputs: dict[str, list[float]]) -> ForwardBackward:
    data = tuple(
        Datum(
            np.arange(len(logprobs), dtype=np.int32),
            np.arange(len(logprobs), dtype=np.int64),
            {name: np.array(values, np.float32) for name, values in given.items()},
        )
        for logprobs, given in zip(LOGPROBS, inputs, strict=True)
    )
    return ForwardBackward(ModelId("m"), 1, data, loss_fn, {}, forward_only=False)


def output(loss: float = 3.0) -> PassOutput:
    arrays = tuple(np.array(values, np.float32) for values in LOGPROBS)
    return PassOutput(RequestId("r"), arrays, {"loss:sum": loss})


SUPERVISED = request("cross_entropy", {"weights": [0.0, 1.0, 0.5]}, {"weights": [1.0]})
REWARDED = request(
    "importance_sampling",
    {"advantages": [0.0, 2.0, -1.0], "logprobs": [0.0, -1.25, -2.5]},
    {"advantages": [1.0], "logprobs": [-3.0]},
)


def test_supervised_losses_are_told_per_weight_and_logprobs_of_trained_positions() -> None:
    sums = sums_of(SUPERVISED, output())
    assert (sums.loss, sums.weight, sums.positions) == (3.0, 2.5, 3)
    assert sums.surprise == pytest.approx(1.0 + 2.0 + 4.0)
    assert (sums.rewarded, sums.sampled) == (0, 0)
    assert (sums.tokens, sums.datums) == (4, 2)


def test_rewards_are_advantages_times_logprobs_and_entropy_is_of_what_was_sampled() -> None:
    sums = sums_of(REWARDED, output())
    assert (sums.weight, sums.positions, sums.rewarded, sums.sampled) == (3, 3, 3, 3)
    assert sums.advantage_logprob == pytest.approx(2 * -1.0 + -1 * -2.0 + 1 * -4.0)
    assert sums.surprise == pytest.approx(1.25 + 2.5 + 3.0)
    assert sums.shift == pytest.approx((-1.25 + 1.0) + (-2.5 + 2.0) + (-3.0 + 4.0))


def test_inputs_of_another_shape_count_as_none() -> None:
    custom = request("custom", {"weights": [1.0]}, {"weights": [1.0]})
    assert (sums_of(custom, output()).weight, sums_of(custom, output()).positions) == (4, 4)


async def points(store: Store) -> list[Point]:
    return await store.read(lambda conn: step_points.points_after(conn, ModelKey(1), 0, 10))


async def store_step(store: Store, curves: StepCurves, seq_id: int, **metrics: float) -> None:
    row = queued(seq_id, ModelKey(1), seq_id)
    windows = curves.stepped([row], [TakenStep(row, metrics, 0.25)], 0.5)
    for op in await windows.ops():
        await store.write(op)


@pytest.fixture
async def curves(store: Store) -> StepCurves:
    await journal.submit_create(store, await journal.new_session(store))  # model 1
    return StepCurves(lambda model: model == ModelKey(1))


def passed(curves: StepCurves, seq_id: int, given: ForwardBackward, seconds: float = 1.0) -> None:
    curves.passed([queued(seq_id, ModelKey(1), seq_id)], {seq_id: given}, [output()], seconds)


async def test_a_step_adds_up_the_passes_of_its_window(store: Store, curves: StepCurves) -> None:
    passed(curves, 1, SUPERVISED)
    passed(curves, 2, SUPERVISED)
    await store_step(store, curves, 3, grad_norm=2.0, sampler_logprob_gap=1e-4)
    passed(curves, 4, REWARDED)
    await store_step(store, curves, 5, grad_norm=math.nan)
    first, second = await points(store)
    assert (first.step, first.seq_id, second.step, second.seq_id) == (1, 3, 2, 5)
    assert first.measured.loss == pytest.approx(6.0 / 5.0)
    assert first.measured.reward_proxy is None
    assert (first.measured.tokens, first.measured.datums) == (8, 4)
    assert (first.measured.grad_norm, first.measured.sampler_gap) == (2.0, 1e-4)
    assert (first.measured.learning_rate, first.measured.compute_s) == (0.25, 2.5)
    assert second.measured.reward_proxy == pytest.approx(-4.0 / 3)
    assert second.measured.grad_norm is None


async def test_a_step_has_the_loss_function_of_the_last_pass_of_its_window(
    store: Store, curves: StepCurves
) -> None:
    passed(curves, 1, SUPERVISED)
    passed(curves, 2, replace(REWARDED, loss_fn="ppo", loss_config={"clip_high_threshold": 1.25}))
    await store_step(store, curves, 3)
    await store_step(store, curves, 4)  # of no pass
    with reading(store) as conn:
        rows = conn.execute(select(StepPoint.loss_fn, StepPoint.loss_fn_config).order_by(StepPoint.step))
        assert [tuple(row) for row in rows] == [("ppo", {"clip_high_threshold": 1.25}), (None, None)]


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    skew(monkeypatch, -3600.0)


async def test_a_wait_is_between_two_times_of_the_database(behind: None, store: Store) -> None:
    await journal.submit_create(store, await journal.new_session(store))
    row = replace(queued(1, ModelKey(1), 1), created_at=store.now())
    for op in await StepCurves(bool, store.now).stepped([row], [TakenStep(row, {}, 0.25)], 0.0).ops():
        await store.write(op)
    (point,) = await points(store)
    assert point.measured.wait_s + point.measured.answer_s < 1800


async def test_a_dropped_window_is_no_part_of_the_next_step(store: Store, curves: StepCurves) -> None:
    passed(curves, 1, SUPERVISED)
    curves.drop(ModelKey(1))
    await store_step(store, curves, 2)
    (point,) = await points(store)
    assert (point.measured.loss, point.measured.tokens) == (None, 0)


async def test_a_step_that_was_not_taken_ends_its_window_without_a_point(
    store: Store, curves: StepCurves
) -> None:
    passed(curves, 1, SUPERVISED)
    assert await curves.stepped([queued(2, ModelKey(1), 2)], [], 0.0).ops() == ()
    await store_step(store, curves, 3)
    assert [point.measured.tokens for point in await points(store)] == [0]


async def test_windows_of_models_that_have_ended_are_dropped_and_no_others(
    store: Store, curves: StepCurves
) -> None:
    passed(curves, 1, SUPERVISED)
    for model in range(2, 10 * step_curves.ENDED):
        curves.passed([queued(model, ModelKey(model), 1)], {model: SUPERVISED}, [output()], 1.0)
    assert len(curves._windows) <= 2 + step_curves.ENDED
    await store_step(store, curves, 2)
    assert [point.measured.tokens for point in await points(store)] == [4]


async def test_a_fault_of_the_sums_costs_their_values_only(store: Store, curves: StepCurves) -> None:
    broken = PassOutput(RequestId("r"), (), {})
    curves.passed([queued(1, ModelKey(1), 1)], {1: SUPERVISED}, [broken], 1.0)
    await store_step(store, curves, 2)
    assert [point.measured.loss for point in await points(store)] == [None]
    assert PassSums() + PassSums(loss=1.0) == PassSums(loss=1.0)
