"""What the workers do next. Pure: what every lane may run in, one unit of work out.

Tenants take turns: whose turn it is says what kind of work comes next, and all that is ready of that kind
goes along, passes within a budget. So a tenant waits at most one unit for each of those who were there before
it, whatever they sent and with however many models, and passes and barriers never starve each other.
"""

from dataclasses import dataclass
from itertools import chain

from skyrl_tinker.domain.ids import RequestKind, SessionId
from skyrl_tinker.engine.scheduling.fair_share import FairShare, Waiting
from skyrl_tinker.engine.scheduling.lanes import PASSES, Lanes, cost
from skyrl_tinker.store.futures.queue import QueuedRow

MERGING = frozenset({RequestKind.OPTIM_STEP, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER})
"""Barriers that the workers take for several models at once."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Forwards and backwards of any tenants; rows of one model in order. `full`: no more would have fit."""

    rows: tuple[QueuedRow, ...]
    full: bool


@dataclass(frozen=True, slots=True)
class Barriers:
    """Of one kind, each of another model; several only if they are of a MERGING kind."""

    rows: tuple[QueuedRow, ...]

    @property
    def kind(self) -> RequestKind:
        return self.rows[0].kind


Unit = Pass | Barriers


class Planner:
    """Takes unit after unit out of the lanes."""

    def __init__(self, lanes: Lanes, budget: int) -> None:
        """`budget`: tokens in a pass. A single request that is larger still runs, alone."""
        self._lanes = lanes
        self._budget = budget
        self._ledger = FairShare()

    def next(self) -> Unit | None:
        """None when nothing may run."""
        unit, ledger = self._plan()
        if unit is not None:
            self._take(unit, ledger)
        return unit

    def ahead(self) -> Pass | None:
        """The next unit, taken while another runs, if it is a full pass: a smaller one may still grow."""
        unit, ledger = self._plan()
        if not isinstance(unit, Pass) or not unit.full:
            return None
        self._take(unit, ledger)
        return unit

    def tenants(self) -> tuple[SessionId, ...]:
        """Who has something to run, in the order of their turns."""
        waiting = self._lanes.runnable(1)
        return self._ledger.of(waiting).tenants(waiting)

    def _plan(self) -> tuple[Unit | None, FairShare]:
        return next_unit(self._lanes.runnable(self._budget), self._ledger, self._budget)

    def _take(self, unit: Unit, ledger: FairShare) -> None:
        self._lanes.take(unit.rows)
        self._ledger = ledger


def next_unit(waiting: Waiting, ledger: FairShare, budget: int) -> tuple[Unit | None, FairShare]:
    """The next unit, None when nothing waits, and the ledger after it."""
    if not waiting:
        return None, ledger
    ledger = ledger.of(waiting)
    first = ledger.first(waiting)
    unit = _pass(first, waiting, ledger, budget) if first.kind in PASSES else _barriers(first, waiting)
    return unit, ledger.after(first, unit.rows)


def _barriers(first: QueuedRow, waiting: Waiting) -> Barriers:
    if first.kind not in MERGING:
        return Barriers((first,))
    return Barriers(tuple(rows[0] for rows in waiting.values() if rows[0].kind is first.kind))


def _pass(first: QueuedRow, waiting: Waiting, ledger: FairShare, budget: int) -> Pass:
    """Whose turn it is has its request in, however large; then all have their shares of what is left."""
    passes = {model: rows for model, rows in waiting.items() if rows[0].kind in PASSES}
    others = (row for row in ledger.in_turn(passes) if row is not first)
    taken: list[QueuedRow] = []
    for row in chain([first], others):
        if taken and cost(row) > budget:
            return Pass(tuple(taken), full=True)
        taken.append(row)
        budget -= cost(row)
    return Pass(tuple(taken), full=budget <= 0)
