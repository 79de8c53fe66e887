"""Choice of the workers' next unit of work, from the runnable rows of all lanes. Pure code.

Who has had least of the trainer decides the kind of work, and all ready work of that kind is batched with it,
passes within a budget of tokens and, while several sessions train, of time. Sessions with little to do decide
first, as long as that takes no more than half of the trainer's time: who sends a request when the last one is
answered waits for the rest of the unit that runs, and shares the next, whatever queues others have.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from skyrl_tinker.domain.ids import ModelKey, RequestKind, SessionId
from skyrl_tinker.engine.scheduling.fair_share import FairShare
from skyrl_tinker.engine.scheduling.lanes import PASSES, Lanes, cost, model_of
from skyrl_tinker.store.futures.queue import QueuedRow

Waiting = Mapping[ModelKey, Sequence[QueuedRow]]
"""Runnable rows of each model, in order; never empty."""
Seconds = Callable[[QueuedRow], float]
"""Estimate of the trainer time that a row takes."""
Apart = Callable[[QueuedRow], Collection[int]]
"""Ids of the rows that run together with a row and with no others; none: it may share a pass."""
MERGING = frozenset({RequestKind.OPTIM_STEP, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER})
"""Barriers that the workers execute for several models at once."""
SHORT_S, SHORT_ROWS = 1.0, 8
"""Most work, as estimated, that a session with little to do has waiting."""
ACTIVE_S = 60.0
"""Time after its last request for which a session counts as training."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Forwards and backwards of any tenants; rows of one model in order. `full`: no more would have fit.

    `again`: memory had run out, for these rows or more.
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
    ahead_s: float = 0.5  # that those may have had more than others who wait, who only join it


class Planner:
    """Takes unit after unit out of the lanes."""

    def __init__(
        self, lanes: Lanes, budget: PassBudget, seconds: Seconds, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`budget`: its seconds hold while several sessions train."""
        self._lanes = lanes
        self._budget = budget
        self._seconds = seconds
        self._clock = clock
        self._shares: FairShare[QueuedRow] = FairShare()
        self._before = self._shares  # as they were before the unit that runs
        self._short: SessionId | None = None  # who decided that unit, having little to do
        self._lead_s = self._lead_before_s = 0.0  # what such sessions had more than the others since
        self._active: dict[SessionId, float] = {}  # when a session last had something runnable

    def pop(self, ahead: tuple[QueuedRow, ...] = ()) -> Unit | None:
        """Take the next unit; None when nothing is runnable. It counts as its estimate until `charge`.

        `ahead`: the rows of a full pass ahead; they are taken if the first of them still is the next.
        """
        waiting, shares, unit = self._plan()
        self._before, self._lead_before_s = shares, self._lead_s
        self._shares = FairShare()
        if unit is not None:
            first = unit.rows[0].session_id
            self._short = first if first in self._short_sessions(waiting) else None
            if ahead and unit.rows[0] is ahead[0] and _first_of(ahead, waiting):
                unit = Pass(ahead, full=True, again=bool(self._lanes.apart(ahead[0])))
            self._lanes.start(unit.rows)
            self.charge((row, self._seconds(row)) for row in unit.rows)
        return unit

    def charge(self, seconds: Iterable[tuple[QueuedRow, float]]) -> None:
        """Count what the rows of the last unit took in place of the estimate."""
        taken = list(seconds)
        self._shares = self._before.charged(taken)
        if self._short is None:
            lead_s = -sum(took for _, took in taken)
        else:
            lead_s = sum(took for row, took in taken if row.session_id == self._short)
        self._lead_s = max(0.0, self._lead_before_s + lead_s)

    def full_pass_ahead(self) -> Pass | None:
        """Return the next unit, as it is now, if it is a full pass: a smaller one may still grow."""
        _, _, unit = self._plan()
        return unit if isinstance(unit, Pass) and unit.full else None

    def in_turn(self) -> tuple[QueuedRow, ...]:
        """Return the next row of every model with runnable work, in the order of their turns."""
        waiting = self._lanes.heads(1)
        return tuple(self._shares.joined_by(waiting.values()).order(waiting.values(), self._seconds))

    def _plan(self) -> tuple[Waiting, FairShare[QueuedRow], Unit | None]:
        waiting = self._lanes.runnable(self._budget.tokens)
        shares = self._shares.joined_by(waiting.values())
        short = self._short_sessions(waiting)
        deciding = {model: rows for model, rows in waiting.items() if rows[0].session_id in short} or waiting
        bounds = self._bounds(waiting)
        unit = next_unit(waiting, deciding, shares, bounds, self._seconds, self._lanes.apart)
        return waiting, shares, unit

    def _short_sessions(self, waiting: Waiting) -> set[SessionId]:
        """Return the sessions with least to do, at most half as much as another one has.

        None while such sessions have had more than the others.
        """
        if self._lead_s > 0:
            return set()
        sessions = {rows[0].session_id for rows in waiting.values()}
        rows_of = self._lanes.small_backlogs(SHORT_ROWS)
        small = {each: sum(map(self._seconds, rows_of[each])) for each in sessions & rows_of.keys()}
        least = min(small.values(), default=math.inf)
        most = max(small.values(), default=0.0) if sessions == small.keys() else math.inf
        if least > min(SHORT_S, most / 2):
            return set()
        return {each for each, work in small.items() if work == least}

    def _bounds(self, waiting: Waiting) -> PassBudget:
        now = self._clock()
        self._active |= {rows[0].session_id: now for rows in waiting.values()}
        self._active = {each: at for each, at in self._active.items() if at > now - ACTIVE_S}
        return self._budget if len(self._active) > 1 else replace(self._budget, seconds=math.inf)


def _first_of(rows: Iterable[QueuedRow], waiting: Waiting) -> bool:
    """Return whether these rows are the first of their models."""
    models: dict[ModelKey, list[QueuedRow]] = {}
    for row in rows:
        models.setdefault(model_of(row), []).append(row)
    return all(waiting.get(model, ())[: len(mine)] == mine for model, mine in models.items())


def next_unit(
    waiting: Waiting,
    deciding: Waiting,
    shares: FairShare[QueuedRow],
    budget: PassBudget,
    seconds: Seconds,
    apart: Apart,
) -> Unit | None:
    """Return the next unit, None when nothing waits. `deciding`: the part of `waiting` that may lead it."""
    if not waiting:
        return None
    first = next(shares.order(deciding.values(), seconds))
    if first.kind not in PASSES:
        return _barriers(first, waiting)
    if together := apart(first):
        rows = tuple(row for rows in waiting.values() for row in rows if row.id in together)
        return Pass(rows, full=True, again=True)
    waiting = {model: rows for model, rows in waiting.items() if not apart(rows[0])}
    passes = {model: rows for model, rows in waiting.items() if _may_join(rows[0], first, shares, budget)}
    others = (row for row in shares.order(passes.values(), seconds) if row is not first)
    return _pass(chain([first], others), budget, seconds)


def _may_join(row: QueuedRow, first: QueuedRow, shares: FairShare[QueuedRow], budget: PassBudget) -> bool:
    """Return whether a pass that `first` decided may take a row: its siblings' turn must come, too."""
    return row.kind in PASSES and (row is first or shares.ahead(row) <= budget.ahead_s)


def _barriers(first: QueuedRow, waiting: Waiting) -> Barriers:
    if first.kind not in MERGING:
        return Barriers((first,))
    return Barriers(tuple(rows[0] for rows in waiting.values() if rows[0].kind is first.kind))


def _pass(rows: Iterator[QueuedRow], budget: PassBudget, seconds: Seconds) -> Pass:
    """Build a pass of the first row, however large, and of those after it that the budget has room for."""
    batch: list[QueuedRow] = []
    tokens, left = budget.tokens, budget.seconds
    for row in rows:
        if batch and (cost(row) > tokens or seconds(row) > left):
            return Pass(tuple(batch), full=True)
        batch.append(row)
        tokens, left = tokens - cost(row), left - seconds(row)
    return Pass(tuple(batch), full=tokens <= 0 or left <= 0)
