"""What is replayed as one: nothing that a model did changes its place or its company of its own model."""

from collections import defaultdict
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from skyrl_tinker.domain.ids import Effect, FutureStatus, ModelKey, RequestId, RequestKind, SessionId
from skyrl_tinker.engine.recovery.replay_order import as_they_ran, merged
from skyrl_tinker.engine.scheduling.row_work import cost, model_of
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.replay.unit_records import RanRow

TOKENS = 10
PASS, STEP, SAVE = RequestKind.FORWARD_BACKWARD, RequestKind.OPTIM_STEP, RequestKind.SAVE_WEIGHTS
EFFECTS = {PASS: Effect.GRADIENTS, STEP: Effect.STEP, SAVE: None}


def ran(
    model: int, seq_id: int, unit: int, kind: RequestKind = PASS, tokens: int = 1, budget: int = 64
) -> RanRow:
    row = QueuedRow(
        100 * model + seq_id,
        RequestId(f"{model}.{seq_id}"),
        kind,
        SessionId("s"),
        None,
        ModelKey(model),
        None,
        seq_id,
        FutureStatus.DONE,
        16 * tokens,
        0.0,
    )
    return RanRow(row, unit, EFFECTS[kind], budget if kind is PASS else None)


def names(batches: Iterable[list[RanRow]]) -> list[list[str]]:
    return [[row.row.request_id for row in batch] for batch in batches]


def test_models_share_batches_of_one_kind() -> None:
    rows = [ran(1, 1, 1), ran(1, 2, 4, STEP), ran(2, 1, 2), ran(2, 2, 3), ran(2, 3, 5, STEP), ran(3, 1, 6)]
    assert names(merged(rows, TOKENS, 0)) == [["1.1", "2.1", "3.1"], ["2.2"], ["1.2", "2.3"]]


def test_passes_in_rows_of_another_size_do_not_share() -> None:
    rows = [ran(1, 1, 1, budget=64), ran(2, 1, 2, budget=32), ran(3, 1, 3, budget=64)]
    assert names(merged(rows, TOKENS, 0)) == [["2.1"], ["1.1", "3.1"]]


def test_a_batch_has_a_bound_that_one_model_may_exceed() -> None:
    rows = [ran(1, 1, 1, tokens=6), ran(2, 1, 2, tokens=5), ran(3, 1, 3, tokens=40), ran(4, 1, 4)]
    assert names(merged(rows, TOKENS, 0)) == [["1.1"], ["2.1"], ["3.1"], ["4.1"]]


def test_a_batch_has_no_more_models_than_have_places_on_the_devices() -> None:
    rows = [ran(model, 1, model) for model in range(5)]
    assert names(merged(rows, TOKENS, 2)) == [["0.1", "1.1"], ["2.1", "3.1"], ["4.1"]]


def test_units_as_they_ran() -> None:
    rows = [ran(1, 1, 5), ran(1, 2, 7, STEP), ran(2, 1, 5), ran(2, 2, 6)]
    assert names(as_they_ran(rows)) == [["1.1", "2.1"], ["2.2"], ["1.2"]]


KINDS = st.sampled_from([PASS, PASS, STEP, SAVE])
HISTORIES = st.lists(
    st.lists(st.tuples(KINDS, st.integers(1, 3), st.integers(1, 12), st.sampled_from([32, 64])), max_size=6),
    max_size=5,
)
"""Of each model its units: kind, requests of a pass, tokens of each, and row budget."""


@given(HISTORIES, st.integers(0, 3))
def test_each_model_runs_its_units_whole_and_in_order(
    histories: list[list[tuple[RequestKind, int, int, int]]], places: int
) -> None:
    rows = []
    for model, units in enumerate(histories):
        seq_id = 0
        for number, (kind, count, tokens, budget) in enumerate(units):
            for _ in range(count if kind is PASS else 1):
                rows.append(ran(model, seq_id, 10 * number + model % 2, kind, tokens, budget))
                seq_id += 1
    batches = list(merged(rows, TOKENS, places))
    assert sorted(names([[row for batch in batches for row in batch]])[0]) == sorted(names([rows])[0])
    of_models: dict[ModelKey, list[int]] = defaultdict(list)
    for batch in batches:
        assert len({(row.effect, row.row_budget) for row in batch}) == 1
        parts: dict[ModelKey, set[int]] = defaultdict(set)
        for row in batch:
            assert row.row.seq_id is not None
            of_models[model_of(row.row)].append(row.row.seq_id)
            parts[model_of(row.row)].add(row.unit)
        assert all(len(units) == 1 for units in parts.values())
        assert len(parts) <= (places or len(parts))
        assert len(parts) == 1 or sum(cost(row.row) for row in batch) <= TOKENS
    assert all(seq_ids == sorted(seq_ids) for seq_ids in of_models.values())
