"""Sessions with little work decide as defined, and are found without a look at all others."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_tinker.domain.ids import ModelKey, RequestKind, SessionId
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.scheduling import planner as planner_module
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.planner import SHORT_ROWS, SHORT_S, PassBudget, Planner
from skyrl_tinker.engine.scheduling.row_work import Work, work_of
from tests.engine.support.rows import queued

SESSIONS, MODELS, BUDGET = 4, 2, 100  # models of one session
FB, FORWARD, STEP = RequestKind.FORWARD_BACKWARD, RequestKind.FORWARD, RequestKind.OPTIM_STEP
SAVE, SYNC = RequestKind.SAVE_WEIGHTS, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER
KEYS = [ModelKey(number) for number in range(SESSIONS * MODELS)]

keys = st.sampled_from(KEYS)
rows = st.tuples(st.sampled_from([FB, FORWARD, STEP, SAVE, SYNC]), st.sampled_from([1, 10, 40, 90]))
come = st.tuples(st.just("come"), keys, st.lists(rows, min_size=1, max_size=5))
change = st.tuples(st.sampled_from(["hold", "resume", "close"]), keys, st.none())
run = st.tuples(st.just("run"), st.none(), st.sampled_from([0.0, 1.0, 3.0]))
"""A unit that takes so much more than estimated."""


def estimate(works: Iterable[Work]) -> float:
    """In fractions whose sums are exact in any order."""
    return sum(work / 512 if isinstance(work, int) else 1 / 8 for work in works)


def defined(lanes: Lanes) -> set[SessionId]:
    works, runnable = defaultdict[SessionId, list[Work]](list), set[SessionId]()
    for key in KEYS:
        for row in lanes.waiting(key):
            works[row.session_id].append(work_of(row))
        runnable |= {row.session_id for row in lanes.runnable(key, BUDGET)}
    few = {each: estimate(works[each]) for each in runnable if len(works[each]) <= SHORT_ROWS}
    least_s = min(few.values(), default=math.inf)
    most_s = max(few.values(), default=0.0) if len(few) == len(runnable) else math.inf
    return {each for each, work_s in few.items() if work_s == least_s <= min(SHORT_S, most_s / 2)}


class Checked(Planner):
    """Compares the sessions that decide with those of the definition."""

    def _short_sessions(self) -> set[SessionId]:
        found = super()._short_sessions()
        assert found == (set() if self._lead_s > 0 else defined(self._lanes))
        return found


@given(st.lists(st.one_of(come, change, run), max_size=60))
@settings(max_examples=200)
def test_any_history(history: list[tuple[str, Any, Any]]) -> None:
    lanes, numbers = Lanes(), itertools.count()
    places = {key: itertools.count() for key in KEYS}
    for key in KEYS:
        lanes.open(key)
    planner = Checked(lanes, PassBudget(BUDGET), estimate)
    for what, key, more in history:
        if what == "come":
            for kind, tokens in more if lanes.is_open(key) else ():
                session = f"session-{key % SESSIONS}"
                lanes.add(queued(next(numbers), key, next(places[key]), kind, tokens=tokens, session=session))
        elif what == "hold":
            lanes.hold(key)
        elif what == "resume":
            lanes.resume(key)
        elif what == "close":
            lanes.close(key, Failure("over", "user"))
        elif (unit := planner.pop()) is not None:
            planner.charge((row, more * estimate([work_of(row)])) for row in unit.rows)
        planner.full_pass_ahead()


def test_the_next_unit_takes_no_look_at_all_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, sizes = Lanes(), list[int]()
    for number in range(500):
        key = ModelKey(number)
        lanes.open(key)
        lanes.add(queued(number, key, 0, FB, tokens=1 + number, session=f"session-{number}"))
    planner = Planner(lanes, PassBudget(10), estimate)
    assert planner.pop() is not None, "it has looked at all that came"
    planner.charge(())  # else others decide

    def counted(of: Callable[..., Any]) -> Callable[..., Any]:
        def best(*values: Any, **default: Any) -> Any:
            found = list(values[0]) if len(values) == 1 else values
            sizes.append(len(found))
            return of(found, **default)

        return best

    for name, of in (("min", min), ("max", max)):
        monkeypatch.setattr(planner_module, name, counted(of), raising=False)
    assert planner.pop() is not None
    assert sizes
    assert max(sizes) < 10
