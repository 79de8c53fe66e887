"""Whatever comes in whatever order: nothing is lost, nothing starves, no unit is too large or too small."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_tinker.domain.ids import ModelKey, RequestKind, SessionId
from skyrl_tinker.engine.scheduling.lanes import PASSES, Lanes, cost, model_of
from skyrl_tinker.engine.scheduling.planner import MERGING, Barriers, Planner, Unit
from skyrl_tinker.store.futures.queue import QueuedRow
from tests.engine.support.rows import queued

BUDGET = 100
TENANTS, MODELS = 4, 3  # models of one tenant
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
asked = st.sampled_from(["pop", "pop_full_pass"])


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
    patience: dict[SessionId, int] = field(default_factory=dict)  # units that may still come before it
    waited: Counter[ModelKey] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.planner = Planner(self.lanes, BUDGET)
        for model in range(TENANTS * MODELS):
            self.lanes.open(ModelKey(model))

    def plan(self, method: str) -> bool:
        """Whether there was a unit."""
        before = self.lanes.runnable(BUDGET)
        unit: Unit | None = getattr(self.planner, method)()
        if unit is None:
            assert method == "pop_full_pass" or not before, "work waits, and there is none"
            return False
        self._check_size(unit, before)
        self._check_waits(unit, before)
        self.ran += unit.rows
        return True

    def _check_size(self, unit: Unit, before: dict[ModelKey, Sequence[QueuedRow]]) -> None:
        if isinstance(unit, Barriers):
            same = [rows[0] for rows in before.values() if rows[0].kind is unit.kind]
            assert unit.kind not in PASSES
            assert set(unit.rows) == set(same) if unit.kind in MERGING else len(unit.rows) == 1
            return
        left = BUDGET - sum(cost(row) for row in unit.rows)
        assert left >= 0 or len(unit.rows) == 1
        over = [
            row for rows in before.values() if rows[0].kind in PASSES for row in rows if row not in unit.rows
        ]
        if not unit.full:
            assert over == [], "it could have been larger"
        elif left > 0:
            assert any(cost(row) > left for row in over), "all that is left would have fit"

    def _check_waits(self, unit: Unit, before: dict[ModelKey, Sequence[QueuedRow]]) -> None:
        """A tenant waits at most a unit for each of those who wait when its own wait begins."""
        tenants = {rows[0].session_id for rows in before.values()}
        served = {row.session_id for row in unit.rows}
        for tenant in tenants:
            left = self.patience.pop(tenant, len(tenants) - 1)
            if tenant not in served:
                assert left > 0, "it has waited longer than its turn"
                self.patience[tenant] = left - 1
        self.waited.update(set(before) - {model_of(row) for row in unit.rows})
        for row in unit.rows:
            del self.waited[model_of(row)]
        assert max(self.waited.values(), default=0) <= TENANTS * MODELS, "a model starves"


@given(st.lists(sent | asked, max_size=120))
@settings(deadline=None, max_examples=300)
def test_any_schedule(schedule: list[Sent | str]) -> None:
    run, events = Run(), requests(schedule)
    for event in events:
        if isinstance(event, str):
            run.plan(event)
        else:
            run.lanes.add(event)
    while run.plan("pop"):
        pass
    for model in range(TENANTS * MODELS):
        mine = [row.seq_id for row in run.ran if row.model_key == model]
        assert mine == list(range(len(mine))), "out of order"
    assert sorted(row.id for row in run.ran) == sorted(row.id for row in events if not isinstance(row, str))
