"""Whatever comes in whatever order: nothing is lost, nothing starves, no unit is too large or too small."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_tinker.domain.ids import ModelKey, RequestKind, SessionId
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.planner import MERGING, Barriers, PassBudget, Planner, Unit
from skyrl_tinker.engine.scheduling.row_work import PASSES, Work, cost, model_of, work_of
from skyrl_tinker.store.futures.queue import QueuedRow
from tests.engine.support.rows import queued

BUDGET, BUDGET_S = 100, 0.06
TENANTS, MODELS = 4, 3  # models of one tenant
SLACK_S = 3 * 2 * 3 * BUDGET / 1000  # three of the largest requests, which take twice the estimate
KINDS = sorted(set(RequestKind) - {RequestKind.SAMPLE})


@dataclass(frozen=True)
class Sent:
    model: int
    kind: RequestKind
    tokens: int
    delay: int  # by how many later requests it is overtaken on its way


sent = st.builds(
    Sent,
    st.integers(0, TENANTS * MODELS - 1),
    st.sampled_from(KINDS) | st.sampled_from([RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD]),
    st.integers(1, BUDGET // 2) | st.integers(1, 3 * BUDGET),
    st.integers(0, 6),
)
"""What the trainer driver does meanwhile, by name of the planner's method."""
asked = st.sampled_from(["pop", "ahead"])


def estimate(works: Iterable[Work]) -> float:
    """A thousand tokens forward and backward take a second, a barrier a hundredth."""
    return sum(work / 3000 if isinstance(work, int) else 0.01 for work in works)


def seconds(row: QueuedRow) -> float:
    return estimate([work_of(row)])


def requests(schedule: Sequence[Sent | str]) -> list[QueuedRow | str]:
    """In the order of their arrival; numbers and places in the lanes as they were sent."""
    places = [itertools.count() for _ in range(TENANTS * MODELS)]
    events: list[tuple[int, QueuedRow | str]] = []
    for number, event in enumerate(schedule):
        if isinstance(event, str):
            events.append((number, event))
            continue
        session = f"session-{event.model // MODELS}"
        place = next(places[event.model])
        row = queued(number, ModelKey(event.model), place, event.kind, tokens=event.tokens, session=session)
        events.append((number + event.delay, row))
    return [event for _, event in sorted(events, key=lambda each: each[0])]


@dataclass
class Run:
    """Feeds a planner, and checks each unit when it comes."""

    lanes: Lanes = field(default_factory=Lanes)
    ran: list[QueuedRow] = field(default_factory=list)
    ahead: tuple[QueuedRow, ...] = ()
    used: Counter[SessionId] = field(default_factory=Counter)  # seconds of all units so far
    since: dict[SessionId, Counter[SessionId]] = field(default_factory=dict)  # `used` as a wait began
    waited: Counter[ModelKey] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.planner = Planner(self.lanes, PassBudget(BUDGET, BUDGET_S, math.inf), estimate, lambda: 0.0)
        for model in range(TENANTS * MODELS):
            self.lanes.open(ModelKey(model))

    def look_ahead(self) -> None:
        """As the driver while a unit runs."""
        unit = self.planner.full_pass_ahead()
        self.ahead = unit.rows if unit else ()

    def plan(self) -> bool:
        """Whether there was a unit."""
        for load in self.lanes.start_fetches():
            self.lanes.fetch_ended(load)
        self.lanes.skip_refused()
        models = map(ModelKey, range(TENANTS * MODELS))
        before = {model: rows for model in models if (rows := self.lanes.runnable(model, BUDGET))}
        assert sorted(row.id for row in self.planner.in_turn()) == sorted(
            rows[0].id for rows in before.values()
        )
        ahead, self.ahead = self.ahead, ()
        unit = self.planner.pop(ahead)
        if unit is None:
            assert not before, "work waits, and there is none"
            return False
        if unit.rows != ahead:  # which was not as large as possible only until others came
            self._check_size(unit, before)
        self._check_waits(unit, before)
        self.ran += unit.rows
        self.planner.charge((row, 2 * seconds(row)) for row in unit.rows)
        return True

    def _check_size(self, unit: Unit, before: dict[ModelKey, Sequence[QueuedRow]]) -> None:
        if isinstance(unit, Barriers):
            same = [rows[0] for rows in before.values() if rows[0].kind is unit.kind]
            assert unit.kind not in PASSES
            assert set(unit.rows) == set(same) if unit.kind in MERGING else len(unit.rows) == 1
            return
        left = BUDGET - sum(cost(row) for row in unit.rows)
        alone = (
            len({row.session_id for row in self.ran} | {rows[0].session_id for rows in before.values()}) < 2
        )
        left_s = math.inf if alone else BUDGET_S - sum(map(seconds, unit.rows))
        assert min(left, left_s) >= -1e-9 or len(unit.rows) == 1
        over = [
            row for rows in before.values() if rows[0].kind in PASSES for row in rows if row not in unit.rows
        ]
        if not unit.full:
            assert over == [], "it could have been larger"
        elif min(left, left_s) > 1e-9:
            fits = [cost(row) <= left and seconds(row) <= left_s - 1e-9 for row in over]
            assert not all(fits), "all that is left would have fit"

    def _check_waits(self, unit: Unit, before: dict[ModelKey, Sequence[QueuedRow]]) -> None:
        """While a tenant waits, no other one gets much more than it does."""
        waiting = {rows[0].session_id for rows in before.values()}
        self.since = {tenant: self.since.get(tenant, self.used.copy()) for tenant in waiting}
        for tenant, since in self.since.items():
            if unit.rows[0].session_id != tenant:
                got = self.used - since
                first = unit.rows[0].session_id
                assert got[first] - got[tenant] <= SLACK_S, "it has waited longer than its turn"
        for row in unit.rows:
            self.used[row.session_id] += 2 * seconds(row)
        self.waited.update(set(before) - {model_of(row) for row in unit.rows})
        for row in unit.rows:
            del self.waited[model_of(row)]
        assert max(self.waited.values(), default=0) <= 10 * TENANTS * MODELS, "a model starves"


@given(st.lists(sent | asked, max_size=120))
@settings(max_examples=300)
def test_any_schedule(schedule: list[Sent | str]) -> None:
    run, events = Run(), requests(schedule)
    for event in events:
        if not isinstance(event, str):
            run.lanes.add(event)
        elif event == "pop":
            run.plan()
        else:
            run.look_ahead()
    while run.plan():
        pass
    for model in range(TENANTS * MODELS):
        mine = [row.seq_id for row in run.ran if row.model_key == model]
        assert mine == list(range(len(mine))), "out of order"
    assert sorted(row.id for row in run.ran) == sorted(row.id for row in events if not isinstance(row, str))
