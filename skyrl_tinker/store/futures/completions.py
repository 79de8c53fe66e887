"""Finished samples of one sampling client, in the order of their results."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, func, select

from skyrl_tinker.domain.ids import FutureStatus, RequestId, SamplingSessionId
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.tables import Future, Result
from skyrl_tinker.store.futures.outcomes import last_result_id

CLONE_SEQ_IDS = 1_000_000_000
"""Number of seq ids that each client of a sampling session has; the first ones are the original client's."""
NEAR, FEW = 20_000, 100
"""Most results of all clients to scan for one client's, and so few that they are.

Between, all results are scanned if they are fewer than its own samples, else those.
"""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample: `cursor` is results.id, `size` the bytes of the result."""

    cursor: int
    request_id: RequestId
    status: FutureStatus
    size: int


_SAMPLES = (
    select(Result.id, Future.request_id, Future.status, func.length(Result.body).label("size"))
    .join(Future, Future.id == Result.future_id)
    .where(Future.seq_id >= bindparam("first"), Future.seq_id < bindparam("end"))
    .order_by(Result.id)
)
# An expression in place of a column keeps its index from being used: SQLite would not choose the faster one.
_NEAR = Prepared(
    _SAMPLES.where(
        Result.id > bindparam("after"),
        func.coalesce(Future.sampling_session_id, "") == bindparam("sampling_session_id"),
    )
)
_FAR = Prepared(
    _SAMPLES.where(
        Result.id + 0 > bindparam("after"), Future.sampling_session_id == bindparam("sampling_session_id")
    )
)
_NEWEST = Prepared(
    select(func.max(Future.seq_id).label("seq_id")).where(
        Future.sampling_session_id == bindparam("sampling_session_id"),
        Future.seq_id >= bindparam("first"),
        Future.seq_id < bindparam("end"),
    )
)


def finished_since(
    conn: Connection, sampling_session_id: SamplingSessionId, clone: int, after: int
) -> tuple[list[Completion], int]:
    """Return this clone's samples with results newer than the cursor `after`, and the newest cursor."""
    newest = last_result_id(conn)
    key = {
        "sampling_session_id": sampling_session_id,
        "first": clone * CLONE_SEQ_IDS,
        "end": (clone + 1) * CLONE_SEQ_IDS,
        "after": after,
    }
    rows = (_NEAR if _all_are_fewer(conn, newest - after, key) else _FAR).rows(conn, key)
    return [Completion(*row) for row in rows], newest


def _all_are_fewer(conn: Connection, results: int, key: Mapping[str, Any]) -> bool:
    """Return whether so many results of all clients are quicker to scan than the client's own samples."""
    if not FEW < results <= NEAR:
        return results <= FEW
    own = _NEWEST.row(conn, key)
    return own is not None and own.seq_id is not None and results <= own.seq_id - key["first"]
