"""Choice of the workers' next unit of work, from the runnable rows of all lanes. Pure code.

Tenants are served in turn: the tenant that is next decides the kind of work, and all ready work of that kind
is batched with it, passes within a token budget. So a tenant waits at most one unit for each tenant that came
before it, whatever they sent and with however many models, and passes and barriers never starve each other.
"""

from dataclasses import dataclass
from itertools import chain

from skyrl_tinker.domain.ids import RequestKind, SessionId
from skyrl_tinker.engine.scheduling.fair_share import FairShare, Waiting
from skyrl_tinker.engine.scheduling.lanes import PASSES, Lanes, cost
from skyrl_tinker.store.futures.queue import QueuedRow

MERGING = frozenset({RequestKind.OPTIM_STEP, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER})
"""Barriers that the workers execute for several models at once."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Forwards and backwards of any tenants; rows of one model in order. `full`: no more would have fit."""

    rows: tuple[QueuedRow, ...]
    full: bool


@dataclass(frozen=True, slots=True)
class Barriers:
    """Barriers of one kind, each of a different model; several only if the kind is MERGING."""

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
        self._shares = FairShare()

    def pop(self) -> Unit | None:
        """Take the next unit; None when nothing is runnable."""
        unit, shares = self._plan()
        if unit is not None:
            self._start(unit, shares)
        return unit

    def pop_full_pass(self) -> Pass | None:
        """Take the next unit while another runs, if it is a full pass: a smaller one may still grow."""
        unit, shares = self._plan()
        if not isinstance(unit, Pass) or not unit.full:
            return None
        self._start(unit, shares)
        return unit

    def tenants(self) -> tuple[SessionId, ...]:
        """Return the tenants with runnable work in the order in which they will be served."""
        waiting = self._lanes.heads(1)
        return self._shares.restricted_to(waiting).tenant_order(waiting)

    def _plan(self) -> tuple[Unit | None, FairShare]:
        return next_unit(self._lanes.runnable(self._budget), self._shares, self._budget)

    def _start(self, unit: Unit, shares: FairShare) -> None:
        self._lanes.start(unit.rows)
        self._shares = shares


def next_unit(waiting: Waiting, shares: FairShare, budget: int) -> tuple[Unit | None, FairShare]:
    """Return the next unit, None when nothing waits, and the shares after it."""
    if not waiting:
        return None, shares
    shares = shares.restricted_to(waiting)
    first = shares.next_row(waiting)
    unit = _pass(first, waiting, shares, budget) if first.kind in PASSES else _barriers(first, waiting)
    return unit, shares.charged(first, unit.rows)


def _barriers(first: QueuedRow, waiting: Waiting) -> Barriers:
    if first.kind not in MERGING:
        return Barriers((first,))
    return Barriers(tuple(rows[0] for rows in waiting.values() if rows[0].kind is first.kind))


def _pass(first: QueuedRow, waiting: Waiting, shares: FairShare, budget: int) -> Pass:
    """Build a pass of `first`, however large, and of fair shares of the budget that it leaves."""
    passes = {model: rows for model, rows in waiting.items() if rows[0].kind in PASSES}
    others = (row for row in shares.round_robin(passes) if row is not first)
    batch: list[QueuedRow] = []
    for row in chain([first], others):
        if batch and cost(row) > budget:
            return Pass(tuple(batch), full=True)
        batch.append(row)
        budget -= cost(row)
    return Pass(tuple(batch), full=budget <= 0)
