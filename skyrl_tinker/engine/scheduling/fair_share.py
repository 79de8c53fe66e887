"""Whose turn it is, among tenants and among one tenant's models. A tenant is a session, whatever it has."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import NamedTuple, TypeVar

from skyrl_tinker.domain.ids import ModelKey, SessionId
from skyrl_tinker.engine.scheduling.lanes import PASSES, cost, model_of
from skyrl_tinker.store.futures.queue import QueuedRow

Waiting = Mapping[ModelKey, Sequence[QueuedRow]]
"""What each model may run, in order; never nothing."""
Anybody = SessionId | ModelKey
Key = TypeVar("Key", SessionId, ModelKey)


class ServiceRecord(NamedTuple):
    """Of a tenant or a model that waits."""

    turn: float  # number of the unit in which it had its last one; the lowest has the next
    tokens: int  # that it has had in passes; the fewest go on


@dataclass(frozen=True, slots=True)
class FairShare:
    """Carried from unit to unit. Who has nothing to run is forgotten, so nobody saves up or owes for ever."""

    units: int = 0
    standings: Mapping[Anybody, ServiceRecord] = field(default_factory=dict)

    def of(self, waiting: Waiting) -> "FairShare":
        """With all who wait, and nobody else."""
        models = _by_tenant(waiting)
        standings = self._entered(models)
        for each in models.values():
            standings |= self._entered(each)
        return FairShare(self.units, standings)

    def first(self, waiting: Waiting) -> QueuedRow:
        """What has the next turn: of the tenant whose last one is longest ago, and so of its models."""
        return min((rows[0] for rows in waiting.values()), key=self._turn)

    def tenants(self, waiting: Waiting) -> tuple[SessionId, ...]:
        """In the order of their turns."""
        rows = sorted((rows[0] for rows in waiting.values()), key=self._turn)
        return tuple(dict.fromkeys(row.session_id for row in rows))

    def _turn(self, row: QueuedRow) -> tuple[float, float, int]:
        return self.standings[row.session_id].turn, self.standings[model_of(row)].turn, row.id

    def in_turn(self, waiting: Waiting) -> Iterator[QueuedRow]:
        """Deficit round robin, a request at a time, over tenants and within each over its models: the next is
        of whoever has had the fewest tokens, and what one has had beyond the others stays in the ledger.
        """
        models = _by_tenant(waiting)
        return self._shared({tenant: self._shared(models[tenant]) for tenant in models})

    def after(self, first: QueuedRow, rows: Sequence[QueuedRow]) -> "FairShare":
        """With a unit of these rows. It was the turn of the first one's tenant, not of those who came along;
        a model has got on in either case."""
        unit = self.units + 1
        standings = dict(self.standings)
        for row in rows:
            tokens = cost(row) if row.kind in PASSES else 0
            turn, had = standings[row.session_id]
            standings[row.session_id] = ServiceRecord(turn, had + tokens)
            standings[model_of(row)] = ServiceRecord(unit, standings[model_of(row)].tokens + tokens)
        standings[first.session_id] = ServiceRecord(unit, standings[first.session_id].tokens)
        return FairShare(unit, standings)

    def _entered(self, keys: Collection[Anybody]) -> dict[Anybody, ServiceRecord]:
        """A newcomer came while the newest unit ran: it is behind all but those whose turn that was.

        Of tokens it has had as few as anybody.
        """
        known = {key: self.standings[key] for key in keys if key in self.standings}
        new = ServiceRecord(self.units - 0.5, min((each.tokens for each in known.values()), default=0))
        return {key: known.get(key, new) for key in keys}

    def _shared(self, queues: Mapping[Key, Iterable[QueuedRow]]) -> Iterator[QueuedRow]:
        tagged = (_tagged(self.standings[key].tokens, rows) for key, rows in queues.items())
        return (row for _, _, row in merge(*tagged))


def _tagged(tokens: int, rows: Iterable[QueuedRow]) -> Iterator[tuple[int, int, QueuedRow]]:
    """Each row with the tokens that its owner has had before it."""
    for row in rows:
        yield tokens, row.id, row  # ids differ: rows are never compared
        tokens += cost(row)


def _by_tenant(waiting: Waiting) -> dict[SessionId, dict[ModelKey, Sequence[QueuedRow]]]:
    tenants: defaultdict[SessionId, dict[ModelKey, Sequence[QueuedRow]]] = defaultdict(dict)
    for model, rows in waiting.items():
        tenants[rows[0].session_id][model] = rows
    return dict(tenants)
