"""Sampled tokens with their logprobs, one record per sequence, for losses that compare with the sampler.

A record belongs to the session that sampled it, and is kept for a time after its last use.
"""

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import Connection, bindparam, insert, select, update

from skyrl_tinker.domain.ids import FutureStatus, SessionId, request_of
from skyrl_tinker.domain.values import Float32, Int32, RoutedExperts
from skyrl_tinker.store.database.rows import AnyRow, database_time
from skyrl_tinker.store.database.tables import Future, StabilityRecord

MAX_IDS = 10_000
"""Most ids in one statement: SQLite binds at most 32766 values."""
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")

Key = tuple[SessionId, str]
"""Session and sequence id: a lookup with the client's own session finds only its own sequences."""


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """Experts to which the tokens of a sequence were routed, but for its last, which was sampled last."""

    prompt: Int32
    experts: RoutedExperts  # [len(prompt) + n - 1, layers, k]


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """One sampled sequence; `prompt_length` counts the tokens of its prompt."""

    sequence_id: str
    tokens: Int32  # [n], sampled
    logprobs: Float32  # [n], under the weights that sampled them
    prompt_length: int
    routing: RoutingRecord | None = None


_COLUMNS = [
    column for column in StabilityRecord.__table__.c if column is not StabilityRecord.__table__.c.session_id
]
_OWNER = select(*(bindparam(column.name, type_=column.type) for column in _COLUMNS), Future.session_id)
_ADD = insert(StabilityRecord).from_select(
    [*(column.name for column in _COLUMNS), "session_id"], _OWNER.where(Future.id == bindparam("future_id"))
)
_NAMED = StabilityRecord.sequence_id.in_(bindparam("ids", expanding=True))
_FIND = select(StabilityRecord.__table__).where(_NAMED)
_RENEW = update(StabilityRecord).where(_NAMED).values(last_used_at=bindparam("now"))
_REQUESTS = select(Future.session_id, Future.sequence_ids, Future.status).where(
    Future.request_id.in_(bindparam("ids", expanding=True))
)


def add(conn: Connection, records: Mapping[int, Sequence[SequenceRecord]]) -> None:
    """Insert records by the id of the future that sampled them."""
    now = database_time(conn)
    rows = [
        {
            "future_id": future_id,
            "sequence_id": record.sequence_id,
            "tokens": record.tokens.astype(_INT32).tobytes(),
            "logprobs": record.logprobs.astype(_FLOAT32).tobytes(),
            "prompt_length": record.prompt_length,
            "last_used_at": now,
            **_stored(record.routing),
        }
        for future_id, sequences in records.items()
        for record in sequences
    ]
    conn.execute(_ADD, rows)


def _stored(routing: RoutingRecord | None) -> dict[str, bytes | None]:
    if routing is None:
        return {"prompt": None, "experts": None}
    experts = io.BytesIO()
    np.save(experts, routing.experts, allow_pickle=False)
    return {"prompt": routing.prompt.astype(_INT32).tobytes(), "experts": experts.getvalue()}


def find(conn: Connection, ids: Collection[str]) -> dict[Key, SequenceRecord]:
    """Return the records of those sequences that have one."""
    records: dict[Key, SequenceRecord] = {}
    for portion in _portions(ids):
        for row in conn.execute(_FIND, {"ids": portion}):
            records[SessionId(row.session_id), row.sequence_id] = _record(row)
    return records


def request_statuses(conn: Connection, ids: Collection[str]) -> dict[Key, FutureStatus]:
    """Return the status of the request of each sequence; ids that were never assigned are left out."""
    statuses: dict[Key, FutureStatus] = {}
    for portion in _portions({request_of(sequence_id) for sequence_id in ids}):
        for row in conn.execute(_REQUESTS, {"ids": portion}):
            session = SessionId(row.session_id)
            statuses |= {(session, sequence_id): row.status for sequence_id in row.sequence_ids}
    return statuses


def renew(conn: Connection, ids: Collection[str]) -> None:
    """Count these records as used now."""
    for portion in _portions(ids):
        conn.execute(_RENEW, {"ids": portion, "now": database_time(conn)})


def _portions(ids: Collection[str]) -> Iterator[list[str]]:
    ordered = sorted(ids)
    for start in range(0, len(ordered), MAX_IDS):
        yield ordered[start : start + MAX_IDS]


def _record(row: AnyRow) -> SequenceRecord:
    tokens, logprobs = np.frombuffer(row.tokens, _INT32), np.frombuffer(row.logprobs, _FLOAT32)
    return SequenceRecord(row.sequence_id, tokens, logprobs, row.prompt_length, _routing(row))


def _routing(row: AnyRow) -> RoutingRecord | None:
    if row.experts is None:
        return None
    experts = np.load(io.BytesIO(row.experts), allow_pickle=False)
    return RoutingRecord(np.frombuffer(row.prompt, _INT32), experts)
