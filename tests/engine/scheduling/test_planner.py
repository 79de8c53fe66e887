"""The planner batches across tenants, is fair, and starves nobody."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pytest

from skyrl_tinker.domain.ids import ModelKey, OwnerId, RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.scheduling.fair_share import FairShare, Path, path_of
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.planner import (
    SHORT_ROWS,
    Apart,
    Barriers,
    Pass,
    PassBudget,
    Planner,
    Unit,
    next_unit,
)
from skyrl_tinker.engine.scheduling.row_work import PASSES, Work, model_of, work_of
from skyrl_tinker.store.futures.queue import QueuedRow
from tests.engine.support.rows import queued

A, B, C = ModelKey(1), ModelKey(2), ModelKey(3)
FB, FORWARD, STEP = RequestKind.FORWARD_BACKWARD, RequestKind.FORWARD, RequestKind.OPTIM_STEP
SAVE, LOAD = RequestKind.SAVE_WEIGHTS, RequestKind.LOAD_WEIGHTS
SYNC = RequestKind.SAVE_WEIGHTS_FOR_SAMPLER
_ids = itertools.count(1)


def row(model: ModelKey, kind: RequestKind = FB, tokens: int = 10, session: str = "") -> QueuedRow:
    """Rows are older the earlier they are made. Each model is a tenant unless `session` says whose."""
    number = next(_ids)
    return queued(number, model, number, kind, tokens=tokens, session=session or f"session-{model}")


def plan(*rows: QueuedRow, budget: int = 100) -> Unit | None:
    return next(planned(list(rows), budget), None)


def lanes(rows: Sequence[QueuedRow]) -> dict[ModelKey, list[QueuedRow]]:
    """As Lanes.runnable: consecutive passes together, a barrier alone."""
    found: dict[ModelKey, list[QueuedRow]] = {}
    for each in rows:
        assert each.model_key is not None
        lane = found.setdefault(each.model_key, [])
        if not lane or (lane[-1].kind in PASSES and each.kind in PASSES):
            lane.append(each)
    return found


def units_of(rows: Sequence[QueuedRow], budget: int = 100) -> list[Unit]:
    """Until nothing is left."""
    return list(planned(list(rows), budget))


def planned(left: list[QueuedRow], budget: int = 100) -> Iterator[Unit]:
    """Unit after unit out of `left`, which may grow."""
    shares = Shares()
    while True:
        unit = shares.take(left, budget)
        if unit is None:
            return
        left[:] = [each for each in left if each not in unit.rows]
        yield unit


class Shares(FairShare[QueuedRow]):
    """Fair shares of those of whom anything is left."""

    def __init__(self) -> None:
        super().__init__()
        self._paths: set[Path] = set()

    def take(self, rows: Sequence[QueuedRow], budget: int, apart: Apart = lambda row: ()) -> Unit | None:
        """The next unit, which takes as long as is estimated."""
        waiting = lanes(rows)
        paths = {path_of(mine[0]): mine for mine in waiting.values()}
        for path in self._paths - paths.keys():
            self.put(path, ())
        for path, mine in paths.items():
            self.put(path, mine)
        self._paths = set(paths)
        first = self.first()
        if first is None:
            self.clear()
            return None
        unit = next_unit(first, waiting, self, PassBudget(budget), seconds, apart)
        self.choose()
        self.charge((each, seconds(each)) for each in unit.rows)
        return unit


def estimate(works: Iterable[Work]) -> float:
    """A thousand tokens forward and backward take a second, a barrier a tenth."""
    return sum(work / 3000 if isinstance(work, int) else 0.1 for work in works)


def seconds(each: QueuedRow) -> float:
    return estimate([work_of(each)])


def run_all(rows: Sequence[QueuedRow], budget: int = 100) -> list[Pass]:
    """The same where all of it are passes."""
    units = units_of(rows, budget)
    return [unit for unit in units if isinstance(unit, Pass)]


def unit_with(wanted: QueuedRow, units: Sequence[Unit]) -> int:
    return next(number for number, unit in enumerate(units) if wanted in unit.rows)


def tokens_of(model: ModelKey, units: Sequence[Unit]) -> int:
    return sum(each.body_bytes // 16 for unit in units for each in unit.rows if each.model_key == model)


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
    rest = [row(model, tokens=50) for _ in range(40) for model in (B, C)]
    large = row(A, tokens=500)
    assert unit_with(large, run_all([*rest, large])) <= 2


def test_two_floods_share_equally() -> None:
    rows = [row(model, tokens=10) for model in (A, B) for _ in range(40)]
    for unit in run_all(rows)[:4]:
        of_a = sum(each.model_key == A for each in unit.rows)
        assert abs(of_a - (len(unit.rows) - of_a)) <= 1


def test_what_did_not_fit_into_memory_runs_with_no_others() -> None:
    rows = [row(A), row(A), row(B), row(C)]
    first, second = frozenset(each.id for each in rows[:3]), frozenset()

    def apart(each: QueuedRow) -> frozenset[int]:
        return first if each.id in first else second

    shares = Shares()
    assert shares.take(rows, 100, apart) == Pass(tuple(rows[:3]), full=True, again=True)
    assert shares.take(rows, 100, apart) == Pass((rows[3],), full=False)


def test_every_request_runs_exactly_once() -> None:
    rows = [row(model, tokens=7 * i + 1) for i in range(20) for model in (A, B, C)]
    ran = [each for unit in run_all(rows) for each in unit.rows]
    assert sorted(each.id for each in ran) == sorted(each.id for each in rows)


@pytest.mark.parametrize("kind", [STEP, SYNC])
def test_barriers_that_the_workers_take_together_go_together(kind: RequestKind) -> None:
    a, b = row(A, kind), row(B, kind)
    assert plan(a, row(C), b) == Barriers((a, b))


def test_barriers_of_another_kind_wait() -> None:
    a, b = row(A, STEP), row(B, SYNC)
    assert plan(a, b) == Barriers((a,))


def test_saves_and_loads_run_one_at_a_time() -> None:
    a, b, c = row(A, SAVE), row(B, LOAD), row(C, SAVE)
    assert [unit.rows for unit in units_of([a, b, c])] == [(a,), (b,), (c,)]


def test_among_newcomers_the_oldest_head_decides_between_passes_and_barriers() -> None:
    barrier, work = row(A, STEP), row(B)
    assert plan(barrier, work) == Barriers((barrier,))
    work, barrier = row(B), row(A, STEP)
    assert isinstance(plan(work, barrier), Pass)


def test_a_barrier_does_not_wait_for_a_flood_of_passes() -> None:
    flood = [row(A, tokens=60) for _ in range(10)]
    barrier = row(B, SAVE)
    assert unit_with(barrier, units_of([*flood, barrier])) == 1


def test_a_pass_does_not_wait_for_a_flood_of_barriers() -> None:
    flood = [row(ModelKey(100 + i), SAVE, session="flood") for i in range(50)]
    small = row(A)
    assert unit_with(small, units_of([*flood, small])) == 1


def test_a_barrier_does_not_wait_for_the_passes_of_its_own_tenant_that_ride_with_others() -> None:
    """Its tenant has something in every unit, and yet this model must get on."""
    flood = [row(A, tokens=30, session="mine") for _ in range(200)]
    others = [row(model, tokens=60) for _ in range(100) for model in (C, ModelKey(4), ModelKey(5))]
    barrier = row(B, SAVE, session="mine")
    assert unit_with(barrier, units_of([*flood, *others, barrier])) <= 20


def test_a_tenant_gets_no_more_for_having_many_models() -> None:
    many = [row(ModelKey(100 + i), tokens=10, session="many") for _ in range(20) for i in range(50)]
    one = [row(A, tokens=10) for _ in range(60)]
    units = run_all([*many, *one])
    for upto in range(1, 11):
        assert abs(tokens_of(A, units[:upto]) - 50 * upto) <= 10


def test_a_tenants_share_is_shared_by_its_models() -> None:
    first = [row(A, tokens=40, session="mine") for _ in range(30)]
    rest = [row(model, tokens=40, session="mine") for model in (B, C) for _ in range(30)]
    units = run_all([*first, *rest])[:15]
    had = [tokens_of(model, units) for model in (A, B, C)]
    assert max(had) - min(had) <= 40


def test_whoever_had_more_in_one_unit_has_less_in_the_next_ones() -> None:
    """A's requests nearly fill a unit, B's are small: over time both have the same."""
    large = [row(A, tokens=90) for _ in range(60)]
    small = [row(B, tokens=10) for _ in range(540)]
    units = run_all([*large, *small])[:50]
    assert abs(tokens_of(A, units) - tokens_of(B, units)) <= 0.15 * tokens_of(A, units)


def test_who_worked_alone_owes_nothing_after_a_pause() -> None:
    shares = Shares()
    shares.take([row(A, tokens=50) for _ in range(20)], 1000)
    shares.take([], 1000)
    unit = shares.take([row(model, tokens=10) for _ in range(20) for model in (A, B)], 200)
    assert unit is not None
    assert tokens_of(A, [unit]) == tokens_of(B, [unit]) == 100


def test_who_comes_back_while_others_wait_still_owes_what_it_had_more() -> None:
    shares = Shares()
    shares.take([row(A, tokens=50) for _ in range(20)], 1000)
    shares.take([row(C)], 1000)
    unit = shares.take([row(model, tokens=10) for _ in range(20) for model in (A, B)], 200)
    assert unit is not None
    assert tokens_of(B, [unit]) == 200


def test_a_newcomer_gets_its_share_and_no_more() -> None:
    left = [row(model, tokens=10) for _ in range(200) for model in (A, C)]
    units = planned(left)
    list(islice(units, 20))
    left += [row(B, tokens=10) for _ in range(200)]
    assert 200 <= tokens_of(B, list(islice(units, 6))) <= 250  # it begins beside the one that had least


def waiting_lanes(*rows: QueuedRow) -> Lanes:
    """Lanes in which these rows wait, of each model one behind the other."""
    waiting = Lanes()
    for each in rows:
        if not waiting.knows(model_of(each)):
            waiting.open(model_of(each), each.seq_id)
        waiting.add(each)
    return waiting


@pytest.mark.parametrize(("models", "decides"), [(SHORT_ROWS, True), (SHORT_ROWS + 1, False)])
def test_the_backlog_of_a_session_is_that_of_all_its_models(models: int, decides: bool) -> None:
    older = [row(A, SAVE) for _ in range(SHORT_ROWS + 1)]
    newer = [row(ModelKey(100 + number), SAVE, session="many") for number in range(models)]
    planner = Planner(waiting_lanes(*older, *newer), PassBudget(100), estimate)
    assert planner.pop() == Barriers((newer[0] if decides else older[0],))


@pytest.mark.parametrize(("others", "decides"), [(4, True), (3, False)])
def test_who_has_no_more_than_half_of_what_another_has_to_do_decides_first(
    others: int, decides: bool
) -> None:
    older, newer = [row(A, SAVE) for _ in range(others)], [row(B, SAVE) for _ in range(2)]
    planner = Planner(waiting_lanes(*older, *newer), PassBudget(100), estimate)
    assert planner.pop() == Barriers((newer[0] if decides else older[0],))


def test_who_always_comes_back_with_little_to_do_decides_for_half_of_the_time() -> None:
    waiting = waiting_lanes(*(row(A, SAVE) for _ in range(20)), row(B, SAVE))
    planner, ran = Planner(waiting, PassBudget(100), estimate), list[ModelKey]()
    while len(ran) < 8:
        unit = planner.pop()
        assert unit is not None
        ran.append(model_of(unit.rows[0]))
        planner.charge([(unit.rows[0], 3.0 if ran[-1] == B else 1.0)])
        if ran[-1] == B:
            waiting.add(row(B, SAVE))
    assert ran == [B, A, A, A, B, A, A, A]


def test_a_unit_counts_as_what_it_took_and_not_as_its_estimate_besides() -> None:
    mine = [row(A, SAVE) for _ in range(20)]
    other = [row(B, SAVE) for _ in range(20)]
    planner = Planner(waiting_lanes(*mine, *other), PassBudget(100), estimate)
    ran = []
    for _ in range(8):
        unit = planner.pop()
        assert unit is not None
        ran.append(model_of(unit.rows[0]))
        planner.charge([(unit.rows[0], 0.3 if ran[-1] == B else 0.01)])
    assert ran == [A, B, A, A, A, A, A, A]


def test_what_a_session_has_to_do_is_estimated_again_after_each_unit() -> None:
    estimates: dict[Work, float] = {SAVE: 0.1, STEP: 0.1}
    older, newer = [row(A, STEP) for _ in range(3)], [row(B, SAVE) for _ in range(3)]
    waiting = waiting_lanes(*older, *newer)
    planner = Planner(waiting, PassBudget(100), lambda works: sum(estimates[each] for each in works))
    assert planner.pop() == Barriers((older[0],))
    estimates[SAVE] = 10.0
    planner.charge([(older[0], 5.0)])
    assert planner.pop() == Barriers((older[1],)), "it has little to do now, beside the other one"


def test_a_session_may_change_its_owner_while_its_requests_wait() -> None:
    adopted = row(A), replace(row(A), owner_id=OwnerId(7))
    planner = Planner(waiting_lanes(*adopted), PassBudget(100), estimate)
    assert planner.pop() == Pass(adopted, full=False)
    planner.charge([(each, 1.0) for each in adopted])


def test_a_pass_that_was_prepared_waits_for_its_turn() -> None:
    flood, small = [row(A, tokens=50) for _ in range(6)], row(B, SAVE)
    waiting = waiting_lanes(*flood)
    planner = Planner(waiting, PassBudget(100), estimate)
    planner.pop()
    ahead = planner.full_pass_ahead()
    assert ahead == Pass(tuple(flood[2:4]), full=True)
    waiting.open(B, small.seq_id)
    waiting.add(small)
    assert [planner.pop(ahead.rows), planner.pop(ahead.rows)] == [Barriers((small,)), ahead]


def test_of_a_prepared_pass_a_model_that_has_gone_leaves_the_others_theirs() -> None:
    mine, gone = [row(A, tokens=50) for _ in range(2)], [row(B, tokens=50) for _ in range(2)]
    waiting = waiting_lanes(*mine, *gone)
    planner = Planner(waiting, PassBudget(100), estimate)
    ahead = planner.full_pass_ahead()
    assert ahead == Pass((mine[0], gone[0]), full=True)
    waiting.close(B, Failure("lost", "server"))
    assert planner.pop(ahead.rows) == Pass(tuple(mine), full=True)


def test_passes_are_short_from_when_another_session_comes_until_a_minute_after_it_has_gone() -> None:
    waiting, now = waiting_lanes(*(row(A, tokens=40) for _ in range(9))), [0.0]
    planner = Planner(waiting, PassBudget(100, seconds=0.05), estimate, lambda: now[0])
    sizes = list[int]()

    def run_one() -> None:
        unit = planner.pop()
        assert unit is not None
        sizes.append(len([each for each in unit.rows if each.model_key == A]))
        planner.charge([(each, 0.01) for each in unit.rows])

    run_one()
    other = row(B, SAVE)
    waiting.open(B, other.seq_id)
    waiting.add(other)
    for at in (100.0, 101.0, 159.0, 161.0):
        now[0] = at
        run_one()
    assert sizes == [2, 0, 1, 1, 2]
