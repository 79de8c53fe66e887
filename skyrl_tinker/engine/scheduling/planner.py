"""Choice of the workers' next unit of work, from the runnable rows of all lanes. Pure code.

- The owner, session and model with the least trainer time so far decide the kind of work; all ready work of
  this kind joins.
- A pass is bounded by a budget of tokens and, while several sessions train, of time.
- Sessions with little waiting work decide first, as long as that takes at most half of the trainer's time. So
  a client that sends each request after the answer to the last one waits only for the rest of the running
  unit, and shares the next, whatever queues others have.
"""

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import attrgetter, is_

from skyrl_tinker.domain.ids import ModelKey, RequestKind, SessionId
from skyrl_tinker.engine.scheduling.fair_share import FairShare, Path, path_of
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.row_work import PASSES, Work, cost, model_of, work_of
from skyrl_tinker.store.futures.queue import QueuedRow

Waiting = Mapping[ModelKey, Sequence[QueuedRow]]
"""Runnable rows of each model, in order; never empty."""
Seconds = Callable[[QueuedRow], float]
"""Estimate of a row's trainer time, in seconds."""
Apart = Callable[[QueuedRow], Collection[int]]
"""Ids of the rows that run together with a row and with no others; none: it may share a pass."""
MERGING = frozenset({RequestKind.OPTIM_STEP, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER})
"""Barriers that the workers execute for several models at once."""
SHORT_S, SHORT_ROWS = 1.0, 8
"""Most waiting work, by estimate in seconds and in rows, of a session with little work."""
ACTIVE_S = 60.0
"""Time after its last request for which a session counts as training."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Forwards and backwards of any tenants; rows of one model in order. `full`: no more would have fit.

    `again`: memory ran out in a pass with these rows, and perhaps others.
    """

    rows: tuple[QueuedRow, ...]
    full: bool
    again: bool = False


@dataclass(frozen=True, slots=True)
class Barriers:
    """Barriers of one kind, each of a different model; several only if the kind is MERGING."""

    rows: tuple[QueuedRow, ...]

    @property
    def kind(self) -> RequestKind:
        return self.rows[0].kind


Unit = Pass | Barriers


@dataclass(frozen=True, slots=True)
class PassBudget:
    """Bounds of a pass. A single request that is larger still runs, alone."""

    tokens: int
    seconds: float = math.inf
    ahead_s: float = 0.5  # most trainer time that joining rows may be ahead of other waiting ones


_Kinds = tuple[RequestKind, ...]
"""Of barriers. Of two sessions with the same ones, that with more work of passes has more to do."""


@dataclass(slots=True)
class _Session:
    """A session with waiting rows, of `models`. `runnable`: paths of the models that have runnable rows.

    `few`: its barriers and the work of its passes, if few rows wait.
    """

    models: dict[ModelKey, None] = field(default_factory=dict)
    runnable: dict[ModelKey, Path] = field(default_factory=dict)
    few: "tuple[_Kinds, int] | None" = None


@dataclass(slots=True)
class _Works:
    """Sessions by the work of their passes. `least_first`: these works, in order."""

    sessions: dict[int, dict[SessionId, None]] = field(default_factory=dict)
    least_first: list[int] = field(default_factory=list)

    def add(self, work: int, session: SessionId) -> None:
        if work not in self.sessions:
            insort(self.least_first, work)
        self.sessions.setdefault(work, {})[session] = None

    def remove(self, work: int, session: SessionId) -> None:
        del self.sessions[work][session]
        if not self.sessions[work]:
            del self.sessions[work], self.least_first[bisect_left(self.least_first, work)]


class Planner:
    """Takes one unit after another from the lanes."""

    def __init__(
        self,
        lanes: Lanes,
        budget: PassBudget,
        estimate: Callable[[Iterable[Work]], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`budget`: its seconds apply while several sessions train. `estimate`: seconds of the rows."""
        self._lanes = lanes
        self._budget = budget
        self._estimate = estimate
        self._clock = clock
        self._waiting: dict[ModelKey, Sequence[QueuedRow]] = {}
        self._sessions: dict[SessionId, _Session] = {}
        self._runnable: dict[SessionId, _Session] = {}  # sessions with runnable rows
        self._few: dict[_Kinds, _Works] = {}  # of those with few rows, by their barriers
        self._with_few = 0  # how many
        self._session_of: dict[ModelKey, SessionId] = {}
        self._shares: FairShare[QueuedRow] = FairShare()
        self._short: SessionId | None = None  # session with little work that decided the running unit
        self._lead_s = self._lead_before_s = 0.0  # trainer time of such sessions beyond that of the others
        self._left: dict[
            SessionId, float
        ] = {}  # when those without a runnable row last had one, oldest first
        self._looked_at = 0.0

    def pop(self, ahead: tuple[QueuedRow, ...] = ()) -> Unit | None:
        """Take the next unit; None when nothing is runnable. It counts as its estimate until `charge`.

        `ahead`: rows of a full pass prepared ahead, which are taken if their first row is still the next.
        """
        short, unit = self._plan(ahead)
        self._lead_before_s = self._lead_s
        if unit is None:
            self._shares.clear()
            return None
        first, shared = unit.rows[0].session_id, len({row.session_id for row in unit.rows}) > 1
        # barriers shared with other sessions delay nobody
        self._short = first if first in short and not (shared and isinstance(unit, Barriers)) else None
        self._lanes.start(unit.rows)
        self._shares.choose()
        self._charge([(row, self._seconds(row)) for row in unit.rows], instead=False)
        return unit

    def charge(self, seconds: Iterable[tuple[QueuedRow, float]]) -> None:
        """Count the time of the last unit's rows instead of the estimate."""
        self._charge(list(seconds), instead=True)

    def full_pass_ahead(self) -> Pass | None:
        """Return the next unit, as of now, if it is a full pass: a smaller one may still grow."""
        _, unit = self._plan()
        return unit if isinstance(unit, Pass) and unit.full else None

    def in_turn(self) -> tuple[QueuedRow, ...]:
        """Return the next row of every model with runnable work, in the order of their turns."""
        self._look()
        return tuple(self._shares.order(self._seconds, lambda rows: islice(rows, 1)))

    def _seconds(self, row: QueuedRow) -> float:
        return self._estimate((work_of(row),))

    def _charge(self, taken: list[tuple[QueuedRow, float]], *, instead: bool) -> None:
        self._shares.charge(taken, instead=instead)
        if self._short is None:
            lead_s = -sum(took for _, took in taken)
        else:
            lead_s = sum(took for row, took in taken if row.session_id == self._short)
        self._lead_s = max(0.0, self._lead_before_s + lead_s)

    def _plan(self, ahead: tuple[QueuedRow, ...] = ()) -> tuple[set[SessionId], Unit | None]:
        """Return the sessions that decide because they have little work, and the next unit.

        `ahead`: rows of a full pass prepared ahead: the next unit if its first row is still the next one.
        """
        self._lanes.skip_refused()
        self._look()
        short = self._short_sessions()
        paths = (path[:2] for each in short for path in self._runnable[each].runnable.values())
        first = self._shares.first(dict.fromkeys(paths) if short else None)
        if first is None:
            return short, None
        bounds = self._bounds()
        if ahead and ahead[0] is first and _first_of(ahead, self._waiting):
            return short, Pass(ahead, full=True, again=bool(self._lanes.apart(first)))
        return short, next_unit(first, self._waiting, self._shares, bounds, self._seconds, self._lanes.apart)

    def _look(self) -> None:
        """Update the sessions from the lanes that changed."""
        changed: dict[SessionId, _Session] = {}
        for model in self._lanes.take_changed():
            if waiting := self._lanes.waiting(model):
                self._session_of[model] = next(iter(waiting)).session_id
            elif model not in self._session_of:
                continue
            session_id = self._session_of[model]
            if (session := self._sessions.get(session_id)) is None:
                session = self._sessions[session_id] = _Session()
            changed[session_id] = session
            session.models[model] = None
            self._set_runnable(session, model, self._lanes.runnable(model, self._budget.tokens))
            if not waiting:
                del session.models[model], self._session_of[model]
        for session_id, session in changed.items():
            of_models = map(self._lanes.works, session.models)
            works = tuple(islice(chain.from_iterable(of_models), SHORT_ROWS + 1))
            if not session.models:
                del self._sessions[session_id]
            if session.runnable:
                self._runnable[session_id] = session
                self._left.pop(session_id, None)
            elif self._runnable.pop(session_id, None):
                self._left[session_id] = self._looked_at
            few = session.runnable and len(works) <= SHORT_ROWS
            self._set_few(session_id, session, works if few else ())

    def _set_runnable(self, session: _Session, model: ModelKey, rows: Sequence[QueuedRow]) -> None:
        had_rows = self._waiting.get(model, ())
        if len(rows) == len(had_rows) and all(map(is_, rows, had_rows)):  # what has come waits behind them
            return
        path, had = path_of(rows[0]) if rows else None, session.runnable.pop(model, None)
        if had is not None and had != path:  # or its session was given to another owner
            self._shares.put(had, ())
            del self._waiting[model]
        if path is not None:
            self._shares.put(path, rows)
            session.runnable[model] = path
            self._waiting[model] = rows

    def _set_few(self, session_id: SessionId, session: _Session, works: tuple[Work, ...]) -> None:
        """Set the waiting work of a session with few rows; none: it has more of them, or cannot run."""
        few = None
        if works:
            kinds = tuple(work for work in works if not isinstance(work, int))
            few = kinds, sum(work for work in works if isinstance(work, int))
        if few == session.few:
            return
        if session.few is not None:
            kinds, passes = session.few
            self._few[kinds].remove(passes, session_id)
            if not self._few[kinds].sessions:
                del self._few[kinds]
        if few is not None:
            kinds, passes = few
            self._few.setdefault(kinds, _Works()).add(passes, session_id)
        self._with_few += (few is not None) - (session.few is not None)
        session.few = few

    def _short_sessions(self) -> set[SessionId]:
        """Return the sessions with the least work, if another has at least twice as much.

        Empty while such sessions have had more trainer time than the others.
        """
        if self._lead_s > 0:
            return set()
        ends = [
            (self._work_s(works.least_first[0], kinds), self._work_s(works.least_first[-1], kinds), works)
            for kinds, works in self._few.items()
        ]
        least_s = min((least_s for least_s, _, _ in ends), default=math.inf)
        most_s = max((most_s for _, most_s, _ in ends), default=0.0)
        if self._with_few < len(self._runnable):
            most_s = math.inf
        if least_s > min(SHORT_S, most_s / 2):
            return set()
        shortest = (works for own_least_s, _, works in ends if own_least_s == least_s)
        return {each for works in shortest for each in works.sessions[works.least_first[0]]}

    def _work_s(self, passes: int, kinds: _Kinds) -> float:
        return self._estimate((passes, *kinds) if passes else kinds)

    def _bounds(self) -> PassBudget:
        self._looked_at = self._clock()
        while self._left and next(iter(self._left.values())) <= self._looked_at - ACTIVE_S:
            del self._left[next(iter(self._left))]
        several = len(self._runnable) + len(self._left) > 1
        return self._budget if several else replace(self._budget, seconds=math.inf)


def _first_of(rows: Iterable[QueuedRow], waiting: Waiting) -> bool:
    """Return whether these rows are the first of their models."""
    models: dict[ModelKey, list[QueuedRow]] = {}
    for row in rows:
        models.setdefault(model_of(row), []).append(row)
    return all(waiting.get(model, ())[: len(mine)] == mine for model, mine in models.items())


def next_unit(
    first: QueuedRow,
    waiting: Waiting,
    shares: FairShare[QueuedRow],
    budget: PassBudget,
    seconds: Seconds,
    apart: Apart,
) -> Unit:
    """Return the unit that `first` decides; all waiting rows have places in `shares`."""
    if first.kind in MERGING:
        same = (rows[0] for rows in waiting.values() if rows[0].kind is first.kind)
        return Barriers(tuple(sorted(same, key=attrgetter("id"))))
    if first.kind not in PASSES:
        return Barriers((first,))
    if together := apart(first):
        models = sorted(waiting.values(), key=lambda rows: rows[0].id)
        return Pass(tuple(row for rows in models for row in rows if row.id in together), True, True)

    def joining(rows: Collection[QueuedRow]) -> Collection[QueuedRow]:
        """Return the rows of a model that may join, not being too far ahead of others in its levels."""
        row = next(iter(rows))
        if row.kind not in PASSES or apart(row):
            return ()
        return rows if row is first or shares.ahead(path_of(row)) <= budget.ahead_s else ()

    others = (row for row in shares.order(seconds, joining) if row is not first)
    return _pass(chain([first], others), budget, seconds)


def _pass(rows: Iterator[QueuedRow], budget: PassBudget, seconds: Seconds) -> Pass:
    """Build a pass of the first row, however large, and of the next ones that fit the budget."""
    batch: list[QueuedRow] = []
    tokens, left = budget.tokens, budget.seconds
    for row in rows:
        size, took_s = cost(row), seconds(row)
        if batch and (size > tokens or took_s > left):
            return Pass(tuple(batch), full=True)
        batch.append(row)
        tokens, left = tokens - size, left - took_s
    return Pass(tuple(batch), full=tokens <= 0 or left <= 0)
