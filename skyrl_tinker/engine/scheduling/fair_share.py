"""Fair queueing among tenants and among the models of one tenant. A tenant is a session."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import NamedTuple, TypeVar

from skyrl_tinker.domain.ids import ModelKey, SessionId
from skyrl_tinker.engine.scheduling.lanes import PASSES, cost, model_of
from skyrl_tinker.store.futures.queue import QueuedRow

Waiting = Mapping[ModelKey, Sequence[QueuedRow]]
"""Runnable rows of each model, in order; never empty."""
Contender = SessionId | ModelKey
Key = TypeVar("Key", SessionId, ModelKey)


class ServiceRecord(NamedTuple):
    """Scheduling record of one waiting tenant or model."""

    last_unit: float  # number of the unit in which it was last served; the lowest is next
    tokens: int  # served in passes; the fewest come first


@dataclass(frozen=True, slots=True)
class FairShare:
    """Scheduling records, carried from unit to unit.

    Tenants and models without runnable work are forgotten, so no credit or debt lasts.
    """

    units: int = 0
    records: Mapping[Contender, ServiceRecord] = field(default_factory=dict)

    def restricted_to(self, waiting: Waiting) -> "FairShare":
        """Return the records of exactly the tenants and models with runnable work."""
        tenants = _by_tenant(waiting)
        records = self._records_of(tenants)
        for models in tenants.values():
            records |= self._records_of(models)
        return FairShare(self.units, records)

    def next_row(self, waiting: Waiting) -> QueuedRow:
        """Return the first row of the least recently served model of the least recently served tenant."""
        return min((rows[0] for rows in waiting.values()), key=self._priority)

    def tenant_order(self, waiting: Waiting) -> tuple[SessionId, ...]:
        """Return the waiting tenants in the order in which they will be served."""
        rows = sorted((rows[0] for rows in waiting.values()), key=self._priority)
        return tuple(dict.fromkeys(row.session_id for row in rows))

    def _priority(self, row: QueuedRow) -> tuple[float, float, int]:
        return self.records[row.session_id].last_unit, self.records[model_of(row)].last_unit, row.id

    def round_robin(self, waiting: Waiting) -> Iterator[QueuedRow]:
        """Yield all rows by deficit round robin over tenants, and within each over its models.

        The next row is always of the one with the fewest tokens; an excess over the others stays on record.
        """
        tenants = _by_tenant(waiting)
        return self._merged({tenant: self._merged(models) for tenant, models in tenants.items()})

    def charged(self, first: QueuedRow, rows: Sequence[QueuedRow]) -> "FairShare":
        """Return the records after a unit of these rows.

        The unit counts as service of the tenant of `first` only, not of those batched with it; for models it
        counts in either case.
        """
        unit = self.units + 1
        records = dict(self.records)
        for row in rows:
            tokens = cost(row) if row.kind in PASSES else 0
            last_unit, served = records[row.session_id]
            records[row.session_id] = ServiceRecord(last_unit, served + tokens)
            records[model_of(row)] = ServiceRecord(unit, records[model_of(row)].tokens + tokens)
        records[first.session_id] = ServiceRecord(unit, records[first.session_id].tokens)
        return FairShare(unit, records)

    def _records_of(self, keys: Collection[Contender]) -> dict[Contender, ServiceRecord]:
        """Return their records, with new ones for newcomers.

        A newcomer arrived while the newest unit ran, so it comes after all but those served in that unit, and
        it starts with the fewest tokens of all.
        """
        known = {key: self.records[key] for key in keys if key in self.records}
        new = ServiceRecord(self.units - 0.5, min((record.tokens for record in known.values()), default=0))
        return {key: known.get(key, new) for key in keys}

    def _merged(self, queues: Mapping[Key, Iterable[QueuedRow]]) -> Iterator[QueuedRow]:
        tagged = (_tagged(self.records[key].tokens, rows) for key, rows in queues.items())
        return (row for _, _, row in merge(*tagged))


def _tagged(tokens: int, rows: Iterable[QueuedRow]) -> Iterator[tuple[int, int, QueuedRow]]:
    """Tag each row with the tokens served to its owner before it."""
    for row in rows:
        yield tokens, row.id, row  # ids differ: rows are never compared
        tokens += cost(row)


def _by_tenant(waiting: Waiting) -> dict[SessionId, dict[ModelKey, Sequence[QueuedRow]]]:
    tenants: defaultdict[SessionId, dict[ModelKey, Sequence[QueuedRow]]] = defaultdict(dict)
    for model, rows in waiting.items():
        tenants[rows[0].session_id][model] = rows
    return dict(tenants)
