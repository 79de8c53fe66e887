"""Which samples of one sampling client finished, in the order of their results."""

from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, func, select

from skyrl_tinker.domain.ids import FutureStatus, OwnerId, RequestId, SamplingSessionId
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.store.database.tables import Future, Result, SamplingSession, Session
from skyrl_tinker.store.owners import OWNED

CLONE_SEQ_IDS = 1_000_000_000
"""So many seq ids of a sampling session each of its clients has; the original one the first."""
NEAR = 20_000
"""Results of everybody that are looked through for one client's; where there are more, its samples are."""


@dataclass(frozen=True, slots=True)
class Completion:
    """`cursor`: results.id. `size`: bytes of the result."""

    cursor: int
    request_id: RequestId
    status: FutureStatus
    size: int


_FOUND = (
    select(Result.id, Future.request_id, Future.status, func.length(Result.body))
    .join(Future, Future.id == Result.future_id)
    .where(Future.seq_id >= bindparam("first"), Future.seq_id < bindparam("end"))
    .order_by(Result.id)
)
# An expression in place of a column keeps its index from being used: which one is quicker, we know better.
_NEAR = _FOUND.where(
    Result.id > bindparam("after"),
    func.coalesce(Future.sampling_session_id, "") == bindparam("sampling_session_id"),
)
_FAR = _FOUND.where(
    Result.id + 0 > bindparam("after"), Future.sampling_session_id == bindparam("sampling_session_id")
)
_MINE = (
    select(SamplingSession.sampling_session_id)
    .join(Session, Session.session_id == SamplingSession.session_id)
    .where(SamplingSession.sampling_session_id == bindparam("sampling_session_id"), OWNED)
)


def require_sampler(conn: Connection, owner: OwnerId | None, sampling_session_id: SamplingSessionId) -> None:
    """Raises NotFoundError if this owner has no such sampling session."""
    key = {"sampling_session_id": sampling_session_id, "owner": owner}
    if conn.scalar(_MINE, key) is None:
        raise NotFoundError(f"no sampling session {sampling_session_id}")


def finished_since(
    conn: Connection, sampling_session_id: SamplingSessionId, clone: int, after: int
) -> tuple[list[Completion], int]:
    """Samples of this clone whose results are newer than the cursor `after`, and the newest result of all."""
    newest = conn.scalar(select(func.max(Result.id))) or 0
    key = {
        "sampling_session_id": sampling_session_id,
        "first": clone * CLONE_SEQ_IDS,
        "end": (clone + 1) * CLONE_SEQ_IDS,
        "after": after,
    }
    rows = conn.execute(_NEAR if newest - after <= NEAR else _FAR, key)
    return [Completion(*row) for row in rows], newest
