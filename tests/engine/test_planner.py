"""The planner batches across tenants, is fair, and starves nobody."""

import itertools
from collections.abc import Sequence

from skyrl_tinker.engine.planner import Pass, Single, Steps, Unit, next_unit
from skyrl_tinker.store.futures import QueuedRow
from skyrl_tinker.wire.ids import FutureStatus, ModelKey, RequestId, RequestKind

A, B, C = ModelKey(1), ModelKey(2), ModelKey(3)
FB, FORWARD, STEP = RequestKind.FORWARD_BACKWARD, RequestKind.FORWARD, RequestKind.OPTIM_STEP
SAVE = RequestKind.SAVE_WEIGHTS
_ids = itertools.count(1)


def row(model: ModelKey, kind: RequestKind = FB, tokens: int = 10) -> QueuedRow:
    """Rows are older the earlier they are made."""
    number = next(_ids)
    return QueuedRow(
        id=number,
        request_id=RequestId(str(number)),
        kind=kind,
        model_key=model,
        sampling_session_id=None,
        seq_id=number,
        status=FutureStatus.PENDING,
        body_bytes=16 * tokens,
        created_at=0.0,
    )


def plan(*rows: QueuedRow, budget: int = 100) -> Unit | None:
    return next_unit(lanes(rows), {}, budget)


def lanes(rows: Sequence[QueuedRow]) -> dict[ModelKey, list[QueuedRow]]:
    """As Lanes.runnable: consecutive passes together, a barrier alone."""
    found: dict[ModelKey, list[QueuedRow]] = {}
    for each in rows:
        assert each.model_key is not None
        lane = found.setdefault(each.model_key, [])
        passes = {FB, FORWARD}
        if not lane or (lane[-1].kind in passes and each.kind in passes):
            lane.append(each)
    return found


def run_all(rows: Sequence[QueuedRow], budget: int = 100) -> list[Pass]:
    """Plan passes until nothing is left."""
    left, credit, units = list(rows), dict[ModelKey, int](), list[Pass]()
    while unit := next_unit(lanes(left), credit, budget):
        assert isinstance(unit, Pass)
        units.append(unit)
        left = [each for each in left if each not in unit.rows]
    return units


def test_nothing_to_do_is_no_unit() -> None:
    assert plan() is None


def test_two_ready_models_share_one_unit() -> None:
    a, b = row(A), row(B, FORWARD)
    unit = plan(a, b)
    assert isinstance(unit, Pass)
    assert set(unit.rows) == {a, b}
    assert not unit.full


def test_consecutive_chunks_of_one_model_share_a_unit_in_order() -> None:
    rows = [row(A) for _ in range(3)]
    unit = plan(*rows)
    assert isinstance(unit, Pass)
    assert list(unit.rows) == rows


def test_a_unit_ends_at_the_budget() -> None:
    units = run_all([row(A, tokens=40) for _ in range(5)])
    assert [len(unit.rows) for unit in units] == [2, 2, 1]
    assert units[0].full


def test_a_request_larger_than_the_budget_runs_alone() -> None:
    units = run_all([row(A, tokens=1000), row(A)])
    assert [len(unit.rows) for unit in units] == [1, 1]


def test_a_small_tenant_never_waits_behind_a_flood() -> None:
    flood = [row(A, tokens=20) for _ in range(50)]
    small = row(B)
    assert small in run_all([*flood, small])[0].rows


def test_a_flood_of_small_tenants_never_starves_a_large_request() -> None:
    large = row(A, tokens=500)
    rest = [row(model, tokens=50) for _ in range(40) for model in (B, C)]
    units = run_all([large, *rest])
    position = next(i for i, unit in enumerate(units) if large in unit.rows)
    assert position < len(units) / 2


def test_two_floods_share_equally() -> None:
    rows = [row(model, tokens=10) for model in (A, B) for _ in range(40)]
    for unit in run_all(rows)[:4]:
        of_a = sum(each.model_key == A for each in unit.rows)
        assert abs(of_a - (len(unit.rows) - of_a)) <= 1


def test_every_request_runs_exactly_once() -> None:
    rows = [row(model, tokens=7 * i + 1) for i in range(20) for model in (A, B, C)]
    ran = [each for unit in run_all(rows) for each in unit.rows]
    assert sorted(each.id for each in ran) == sorted(each.id for each in rows)


def test_steps_of_several_models_go_together() -> None:
    a, b = row(A, STEP), row(B, STEP)
    assert plan(a, b) == Steps((a, b))


def test_saves_and_loads_run_one_at_a_time() -> None:
    a, b = row(A, SAVE), row(B, RequestKind.LOAD_WEIGHTS)
    assert plan(a, b) == Single(a)


def test_the_oldest_head_decides_between_passes_and_barriers() -> None:
    barrier, work = row(A, STEP), row(B)
    assert plan(barrier, work) == Steps((barrier,))
    work, barrier = row(B), row(A, STEP)
    assert isinstance(plan(work, barrier), Pass)


def test_a_barrier_does_not_wait_for_a_flood_of_passes() -> None:
    flood = [row(A, tokens=60) for _ in range(5)]
    barrier = row(B, SAVE)
    later = [row(A, tokens=60) for _ in range(5)]
    left: list[QueuedRow] = [*flood, barrier, *later]
    units = 0
    while not isinstance(unit := next_unit(lanes(left), {}, 100), Single):
        assert isinstance(unit, Pass)
        left = [each for each in left if each not in unit.rows]
        units += 1
    assert unit.row == barrier
    assert units == len(flood)
