"""A model's requests run strictly by seq_id, and a refused one has exactly the reach it should."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from skyrl_tinker.domain.ids import FutureStatus, ModelKey, RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.scheduling import lanes as lanes_module
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.planner import PassBudget, Planner
from skyrl_tinker.store.futures.queue import QueuedRow
from tests.engine.support.rows import queued

MODEL = ModelKey(1)
BUDGET = 1000
FB, FORWARD, STEP = RequestKind.FORWARD_BACKWARD, RequestKind.FORWARD, RequestKind.OPTIM_STEP


def row(
    seq_id: int,
    kind: RequestKind = FB,
    *,
    model: ModelKey = MODEL,
    status: FutureStatus = FutureStatus.PENDING,
    tokens: int = 10,
    session: str = "session",
) -> QueuedRow:
    number = 1000 * model + seq_id
    return queued(number, model, seq_id, kind, tokens=tokens, session=session, status=status)


def refused(seq_id: int, kind: RequestKind = FB) -> QueuedRow:
    return row(seq_id, kind, status=FutureStatus.FAILED)


def created(*rows: QueuedRow) -> Lanes:
    """Lanes with one model whose creation has run, and these rows waiting."""
    lanes = Lanes()
    lanes.open(MODEL)
    lanes.add(row(0, RequestKind.CREATE_MODEL))
    lanes.start(lanes.runnable(MODEL, BUDGET))
    for each in rows:
        lanes.add(each)
    return lanes


def drain(lanes: Lanes) -> list[int]:
    """Run everything that can run, with files of loads at hand; the seq_ids in the order they ran."""
    order: list[int] = []
    while heads := _runnable(lanes):
        for rows in heads.values():
            lanes.start(rows)
            order += [each.seq_id for each in rows if each.seq_id is not None]
    return order


def _runnable(lanes: Lanes) -> dict[ModelKey, Sequence[QueuedRow]]:
    for load in lanes.start_fetches():
        lanes.fetch_ended(load)
    return heads(lanes)


def heads(lanes: Lanes) -> dict[ModelKey, Sequence[QueuedRow]]:
    lanes.skip_refused()
    models = (ModelKey(number) for number in range(4))
    return {model: rows for model in models if (rows := lanes.runnable(model, BUDGET))}


def test_everything_waits_for_the_creation() -> None:
    lanes = Lanes()
    lanes.open(MODEL)
    lanes.add(row(1))
    assert heads(lanes) == {}
    lanes.add(row(0, RequestKind.CREATE_MODEL))
    assert drain(lanes) == [0, 1]


def test_chunks_arriving_first_last_run_in_seq_order() -> None:
    assert drain(created(row(2), row(3), row(1), row(4, STEP))) == [1, 2, 3, 4]


def test_a_row_that_comes_again_after_it_ran_is_not_kept() -> None:
    lanes = created(row(1))
    assert drain(lanes) == [1]
    lanes.add(row(1))
    assert lanes.close(MODEL, Failure("over", "user")) == []


def test_a_gap_parks_what_comes_after_it() -> None:
    lanes = created(row(1), row(3))
    assert drain(lanes) == [1]
    lanes.add(row(2))
    assert drain(lanes) == [2, 3]


def test_consecutive_passes_come_together_up_to_the_next_barrier() -> None:
    lanes = created(row(1), row(2, FORWARD), row(3, STEP), row(4))
    assert [each.seq_id for each in lanes.runnable(MODEL, BUDGET)] == [1, 2]


def test_a_barrier_comes_alone() -> None:
    lanes = created(row(1, STEP), row(2, STEP))
    assert [each.seq_id for each in lanes.runnable(MODEL, BUDGET)] == [1]


def test_a_flood_is_looked_at_only_as_far_as_a_unit_reaches() -> None:
    lanes = created(*(row(i, tokens=100) for i in range(1, 500)))
    assert len(lanes.runnable(MODEL, BUDGET)) == 10


def test_a_refused_request_lets_the_next_one_pass() -> None:
    assert drain(created(refused(1, RequestKind.SAVE_WEIGHTS), refused(2, FORWARD), row(3))) == [3]


def test_a_refused_forward_backward_poisons_its_window_and_names_itself() -> None:
    lanes = created(row(2, STEP))
    lanes.add(refused(1), "datum 0: weights has length 2, expected 3")
    lanes.skip_refused()
    assert lanes.window_error(MODEL) == (
        "forward_backward with seq_id 1 was refused: datum 0: weights has length 2, expected 3"
    )


def test_of_several_refusals_in_one_window_its_step_names_the_first() -> None:
    """The later ones may be its consequences."""
    lanes = created()
    lanes.add(refused(1), "the cause")
    lanes.add(refused(2), "a consequence")
    lanes.skip_refused()
    assert lanes.window_error(MODEL) == "forward_backward with seq_id 1 was refused: the cause"


def test_a_refused_forward_poisons_nothing() -> None:
    lanes = created(refused(1, FORWARD), row(2, STEP))
    lanes.skip_refused()
    assert lanes.window_error(MODEL) is None


def test_a_refusal_in_the_next_window_leaves_this_one_alone() -> None:
    lanes = created(row(1), row(2, STEP), refused(3))
    lanes.start(lanes.runnable(MODEL, BUDGET))
    lanes.skip_refused()
    assert lanes.window_error(MODEL) is None


def test_looking_at_the_lanes_skips_nothing() -> None:
    """Else a look while a step runs would note the refusal in the window that the step is about to end."""
    lanes = created(row(1, STEP), refused(2), row(3, STEP))
    lanes.start(lanes.runnable(MODEL, BUDGET))
    assert Planner(lanes, PassBudget(BUDGET), lambda _: 1.0).in_turn() == ()
    lanes.reset_window(MODEL)
    assert [each.seq_id for each in heads(lanes)[MODEL]] == [3]
    assert lanes.window_error(MODEL) is not None


def test_a_refused_step_still_comes_to_clear_its_window() -> None:
    lanes = created(row(1), refused(2, STEP), row(3))
    assert drain(lanes) == [1, 2, 3]


def test_the_first_reason_for_poison_stays_until_cleansed() -> None:
    lanes = created()
    lanes.invalidate_window(MODEL, "first")
    lanes.invalidate_window(MODEL, "second")
    assert lanes.window_error(MODEL) == "first"
    lanes.reset_window(MODEL)
    assert lanes.window_error(MODEL) is None


def test_closing_returns_the_waiting_rows_that_nobody_answered_yet() -> None:
    lanes = created(row(1), refused(2), row(4))
    gone = Failure("lost", "server")
    assert [each.seq_id for each in lanes.close(MODEL, gone)] == [1, 4]
    assert lanes.closed_by(MODEL) == gone
    lanes.forget(MODEL)
    assert not lanes.knows(MODEL)
    assert heads(lanes) == {}


def test_a_model_that_is_to_go_is_drained_once_all_that_came_before_its_end_has_run() -> None:
    lanes = created(row(1), row(2))
    lanes.end(MODEL)
    assert [lanes.ended(row(seq_id)) for seq_id in (2, 3)] == [False, True]
    for seq_id in (1, 2):
        assert not lanes.drained(MODEL)
        lanes.start([row(seq_id)])
    assert lanes.drained(MODEL)


def test_a_model_that_has_run_all_is_drained_as_soon_as_it_is_to_go() -> None:
    lanes = created(row(1))
    drain(lanes)
    lanes.end(MODEL)
    assert lanes.drained(MODEL)
    assert lanes.ended(row(2))


def test_a_row_that_expires_before_it_starts_is_skipped_and_its_step_says_why() -> None:
    lanes = created(row(1), row(2, STEP))
    lanes.expire(row(1), "the deadline")
    assert drain(lanes) == [2]
    assert lanes.window_error(MODEL) == "forward_backward with seq_id 1 was refused: the deadline"


def test_a_backward_that_expires_while_it_runs_invalidates_its_window_and_a_forward_does_not() -> None:
    lanes = created(row(1), row(2, FORWARD))
    assert drain(lanes) == [1, 2]
    lanes.expire(row(2, FORWARD), "the deadline")
    assert lanes.window_error(MODEL) is None
    lanes.expire(row(1), "the deadline")
    assert lanes.window_error(MODEL) == "the deadline"


LOAD, SYNC = row(1, RequestKind.LOAD_WEIGHTS), row(0, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER)
SAVE = row(0, RequestKind.SAVE_WEIGHTS_EXTERNAL)


@pytest.mark.parametrize(
    "change",
    [
        lambda lanes: lanes.add(row(2)),
        lambda lanes: lanes.expire(row(1), "the deadline"),
        lambda lanes: lanes.start([row(1)]),
        lambda lanes: lanes.put_back(row(0)),
        lambda lanes: lanes.put_back_apart([row(0)]),
        lambda lanes: lanes.hold(MODEL),
        lambda lanes: lanes.resume(MODEL),
        lambda lanes: lanes.save_began(SAVE),
        lambda lanes: lanes.save_ended(SAVE),
        lambda lanes: lanes.save_began(SYNC),
        lambda lanes: lanes.save_ended(SYNC),
        lambda lanes: lanes.write_began(SYNC),
        lambda lanes: lanes.write_ended(SYNC),
        lambda lanes: lanes.fetch_ended(LOAD),
        lambda lanes: lanes.close(MODEL, Failure("lost", "server")),
        lambda lanes: lanes.open(MODEL),
    ],
)
def test_whatever_may_change_what_is_runnable_is_told_once(change: Callable[[Lanes], object]) -> None:
    lanes = created(row(1))
    lanes.take_changed()
    change(lanes)
    assert (lanes.take_changed(), lanes.take_changed()) == ([MODEL], [])


def test_models_do_not_wait_for_each_other() -> None:
    other = ModelKey(2)
    lanes = created(row(2))
    lanes.open(other)
    lanes.add(row(0, RequestKind.CREATE_MODEL, model=other))
    assert set(heads(lanes)) == {other}


def test_taking_out_of_order_is_a_bug_that_shows() -> None:
    lanes = created(row(1), row(2))
    with pytest.raises(AssertionError, match="out of order"):
        lanes.start([row(2)])


@pytest.mark.parametrize("kind", [RequestKind.SAVE_WEIGHTS, RequestKind.LOAD_WEIGHTS])
def test_a_held_lane_runs_up_to_its_next_save_or_load(kind: RequestKind) -> None:
    lanes = created(row(1), row(2, STEP), row(3, kind), row(4))
    lanes.save_began(SAVE)
    assert drain(lanes) == [1, 2]
    assert lanes.under_way(MODEL)
    lanes.save_ended(SAVE)
    assert drain(lanes) == [3, 4]


def test_a_lane_that_two_hold_waits_for_both() -> None:
    lanes = created(row(1))
    lanes.hold(MODEL)
    lanes.hold(MODEL)
    lanes.resume(MODEL)
    assert drain(lanes) == []
    lanes.resume(MODEL)
    assert drain(lanes) == [1]


def test_a_model_that_was_closed_meanwhile_is_resumed_in_vain() -> None:
    lanes = created()
    lanes.save_began(SAVE)
    lanes.close(MODEL, Failure("lost", "server"))
    lanes.save_ended(SAVE)
    assert not lanes.under_way(MODEL)


def test_a_load_waits_until_all_saves_for_samplers_before_it_are_written() -> None:
    lanes = created(row(1, RequestKind.SAVE_WEIGHTS), row(2, RequestKind.LOAD_WEIGHTS), row(3, STEP))
    other = replace(SYNC, seq_id=-1)
    lanes.save_began(other)
    lanes.save_began(SYNC)
    assert drain(lanes) == [1]
    lanes.save_ended(other)
    assert drain(lanes) == []
    lanes.save_ended(SYNC)
    assert drain(lanes) == [2, 3]


def test_saves_of_checkpoints_that_are_not_answered_are_known_up_to_a_seq_id() -> None:
    lanes = created()
    lanes.save_began(row(3, RequestKind.SAVE_WEIGHTS))
    lanes.save_began(row(5, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER))
    assert [lanes.saves_until(MODEL, seq_id) for seq_id in (2, 3, 9)] == [False, True, True]
    lanes.save_ended(row(3, RequestKind.SAVE_WEIGHTS))
    lanes.save_began(row(6, RequestKind.SAVE_WEIGHTS_EXTERNAL))
    assert [lanes.saves_until(MODEL, seq_id) for seq_id in (4, 5, 6)] == [False, False, True]
    assert not lanes.saves_until(ModelKey(2), 9)


def test_a_save_for_samplers_waits_until_the_one_before_it_is_written() -> None:
    kind = RequestKind.SAVE_WEIGHTS_FOR_SAMPLER
    lanes = created(row(1, RequestKind.SAVE_WEIGHTS), row(2), row(3, kind), row(4, STEP))
    earlier = row(0, kind)
    lanes.write_began(earlier)
    lanes.save_began(earlier)
    assert drain(lanes) == [1, 2]
    lanes.write_ended(earlier)
    assert drain(lanes) == [3, 4], "although the earlier one is not published yet"
    lanes.write_began(row(3, kind))
    lanes.write_ended(earlier)  # says so once more at its end
    lanes.add(row(5, kind))
    assert drain(lanes) == []


def test_a_lane_stands_until_the_files_of_its_load_are_here() -> None:
    other = ModelKey(2)
    lanes = created(refused(1, FORWARD), row(2, RequestKind.LOAD_WEIGHTS), row(3))
    lanes.open(other, 1)
    lanes.add(row(1, model=other))
    assert set(heads(lanes)) == {other}
    (load,) = lanes.start_fetches()
    assert (load, lanes.start_fetches()) == (row(2, RequestKind.LOAD_WEIGHTS), [])
    assert lanes.under_way(MODEL)
    assert lanes.statuses()[MODEL].held
    assert set(heads(lanes)) == {other}
    lanes.fetch_ended(load)
    assert not lanes.under_way(MODEL)
    assert lanes.runnable(MODEL, BUDGET) == [load]
    assert drain(lanes) == [2, 1, 3]


@pytest.mark.parametrize("closed", [False, True])
def test_a_load_that_expires_or_is_lost_while_it_is_fetched_holds_nothing_any_more(closed: bool) -> None:
    lanes = created(row(1, RequestKind.LOAD_WEIGHTS), row(2))
    (load,) = lanes.start_fetches()
    if closed:
        lanes.close(MODEL, Failure("lost", "server"))
    else:
        lanes.expire(load, "it waited too long")
        assert drain(lanes) == [2]
    lanes.fetch_ended(load)
    assert not lanes.under_way(MODEL)
    assert not lanes.waits(load)


def test_a_row_that_is_put_back_runs_before_all_others_of_its_model() -> None:
    lanes = created(row(1, RequestKind.LOAD_WEIGHTS), row(2))
    (load,) = lanes.start_fetches()
    lanes.fetch_ended(load)
    (rows,) = heads(lanes).values()
    lanes.start(rows)
    lanes.put_back(rows[0])
    assert lanes.start_fetches() == [], "its files are here"
    lanes.hold(MODEL)
    assert heads(lanes) == {}
    lanes.resume(MODEL)
    assert drain(lanes) == [1, 2]


def test_rows_that_are_put_back_apart_come_together_and_without_those_behind_them() -> None:
    lanes = created(row(1), row(2), row(3))
    rows = lanes.runnable(MODEL, BUDGET)
    lanes.start(rows[:2])
    lanes.put_back_apart(rows[:2])
    assert heads(lanes) == {MODEL: list(rows[:2])}
    assert lanes.apart(rows[0]) == lanes.apart(rows[1]) == {rows[0].id, rows[1].id}
    assert not lanes.apart(rows[2])
    lanes.start(rows[:2])
    for each in rows[:2]:
        lanes.put_back_apart([each])
    assert heads(lanes) == {MODEL: [rows[0]]}
    assert drain(lanes) == [1, 2, 3]
    assert not lanes.apart(rows[0])


def skipped_and_put_back() -> Lanes:
    """Lanes in which a refused row was skipped while the one before it ran, which is then put back."""
    save = row(1, RequestKind.SAVE_WEIGHTS)
    lanes = created(save, refused(2), row(3))
    lanes.start([save])
    assert heads(lanes) == {MODEL: [row(3)]}
    lanes.put_back(save)
    return lanes


def test_a_refused_row_that_was_skipped_while_one_ran_is_no_gap_once_that_is_put_back() -> None:
    lanes = skipped_and_put_back()
    assert drain(lanes) == [1, 3]
    assert lanes.window_error(MODEL) is not None


def test_a_refused_row_that_comes_again_after_it_was_skipped_is_not_kept() -> None:
    lanes = skipped_and_put_back()
    lanes.reset_window(MODEL)
    lanes.add(refused(2))
    assert drain(lanes) == [1, 3]
    assert lanes.window_error(MODEL) is None, "its window is over"
    assert lanes.statuses() == {}


def test_the_state_of_a_deep_queue_is_its_first_row_s(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = created(*(row(seq_id) for seq_id in range(1, 1000)))
    with monkeypatch.context() as patch:
        patch.setattr(lanes_module, "min", None, raising=False)  # it would look at all rows
        assert deep.statuses()[MODEL].lowest == 1
    gap = created(row(3), row(2))
    assert gap.statuses()[MODEL].lowest == 2
