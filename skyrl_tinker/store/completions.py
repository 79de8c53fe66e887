"""Which samples of one sampling client finished, in the order of their results."""

from dataclasses import dataclass

from sqlalchemy import Select, bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.store.owners import OWNED
from skyrl_tinker.store.tables import Future, Result, SamplingSession, Session
from skyrl_tinker.wire.ids import FutureStatus, OwnerId, RequestId, SamplingSessionId

CLONE_SEQ_IDS = 1_000_000_000
"""Of the seq ids of a sampling session each of its clones has so many, the original client the first ones."""
NEAR = 20_000
"""Results of all clients that are looked through at once; for more, the client's samples are."""


@dataclass(frozen=True, slots=True)
class Completion:
    """`size`: bytes of the result."""

    request_id: RequestId
    failed: bool
    size: int


def _completions(*columns: object) -> Select[tuple[RequestId, FutureStatus, int]]:
    """The unary plus of SQLite and of PostgreSQL changes no value, and keeps an index from being used."""
    return (
        select(Future.request_id, Future.status, func.length(Result.body))
        .join_from(Result, Future, Future.id == Result.future_id)
        .where(*columns)  # type: ignore[arg-type]
        .order_by(Result.id)
    )


_SESSION_ID = bindparam("sampling_session_id")
_FROM, _TO, _AFTER, _LAST = (bindparam(name) for name in ("first", "end", "after", "last"))
_MINE = (
    select(SamplingSession.sampling_session_id)
    .join(Session, Session.session_id == SamplingSession.session_id)
    .where(SamplingSession.sampling_session_id == _SESSION_ID, OWNED)
)


async def require_sampler(
    conn: AsyncConnection, owner: OwnerId | None, sampling_session_id: SamplingSessionId
) -> None:
    """Raises NotFoundError if this owner has no such sampling session."""
    key = {"sampling_session_id": sampling_session_id, "owner": owner}
    if await conn.scalar(_MINE, key) is None:
        raise NotFoundError(f"no sampling session {sampling_session_id}")
