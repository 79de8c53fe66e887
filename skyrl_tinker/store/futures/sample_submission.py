"""Submission of samples: one statement checks the request and inserts the future."""

from dataclasses import dataclass

from sqlalchemy import Connection, and_, bindparam, literal, select

from skyrl_tinker.domain.ids import FutureStatus, OwnerId, RequestKind, SamplingSessionId, sequence_ids
from skyrl_tinker.errors import NotFoundError, OverloadedError
from skyrl_tinker.store import session_records
from skyrl_tinker.store.database.group_commit import Later
from skyrl_tinker.store.database.prepared import Gathered
from skyrl_tinker.store.database.rows import database_time
from skyrl_tinker.store.database.tables import Future, SamplingSession, Session
from skyrl_tinker.store.futures.record import (
    FIRST,
    SESSION,
    Accepted,
    check_seq_id,
    existing_answer,
    insert_body,
    new_request_id,
    require_same,
)
from skyrl_tinker.store.owners import OWNED

_SAME_KEY = and_(
    Future.sampling_session_id == bindparam("sampling_session_id"), Future.seq_id == bindparam("seq_id")
)
_OWN_SAMPLER = and_(SamplingSession.sampling_session_id == bindparam("sampling_session_id"), OWNED)
_VALUES = {
    Future.request_id: bindparam("request_id", type_=Future.request_id.type),
    Future.kind: literal(RequestKind.SAMPLE, Future.kind.type),
    Future.session_id: Session.session_id,
    Future.sampling_session_id: SamplingSession.sampling_session_id,
    Future.seq_id: bindparam("seq_id", type_=Future.seq_id.type),
    Future.digest: bindparam("digest", type_=Future.digest.type),
    Future.sequence_ids: bindparam("sequence_ids", type_=Future.sequence_ids.type),
    Future.tokens: bindparam("tokens", type_=Future.tokens.type),
    Future.sequences: bindparam("sequences", type_=Future.sequences.type),
    Future.status: literal(FutureStatus.PENDING, Future.status.type),
    Future.created_at: bindparam("now", type_=Future.created_at.type),
}
_INSERT = Gathered(
    Future,
    [column.key for column in _VALUES],
    select(*_VALUES.values())
    .select_from(SamplingSession)
    .join(Session, Session.session_id == SamplingSession.session_id)
    .where(_OWN_SAMPLER, Session.finished_at.is_(None), ~select(Future.id).where(_SAME_KEY).exists()),
    key="request_id",
)
_FIRST_OF_KEY = (
    select(*SESSION, *FIRST)
    .select_from(SamplingSession)
    .join(Session, Session.session_id == SamplingSession.session_id)
    .outerjoin(
        Future,
        and_(
            Future.sampling_session_id == SamplingSession.sampling_session_id,
            Future.seq_id == bindparam("seq_id"),
        ),
    )
    .where(_OWN_SAMPLER)
)


@dataclass(frozen=True, slots=True)
class NewSample:
    """Checked request. `tokens`: the most that it computes; `sequences`: as many as SampleRequest.places."""

    sampling_session_id: SamplingSessionId
    seq_id: int
    digest: bytes
    body: bytes
    num_samples: int
    tokens: int
    sequences: int


def submit_sample(
    conn: Connection, new: NewSample, owner: OwnerId | None, refusal: OverloadedError | None = None
) -> Later[Accepted]:
    """Submit a sample; `sequence_ids` of the answer has one id per sample.

    `refusal` is raised for a new request, and nothing is written then.

    Raises SeqIdReusedError, NotFoundError (no sampling session), GoneError (session finished).
    """
    check_seq_id("seq_id", new.seq_id, lowest=0)
    request_id = new_request_id()
    ids = sequence_ids(request_id, new.num_samples)
    key = {"sampling_session_id": new.sampling_session_id, "seq_id": new.seq_id, "owner": owner}
    values = {
        **key,
        "request_id": request_id,
        "digest": new.digest,
        "sequence_ids": ids,
        "tokens": new.tokens,
        "sequences": new.sequences,
        "now": database_time(conn),
    }
    sent = None if refusal else _INSERT.send(conn, values)

    def answer() -> Accepted:
        if sent is None or (row := sent.row()) is None:
            return _answer_refused(conn, key, new.digest, refusal)
        insert_body(conn, row.id, new.body)
        return Accepted(request_id, ids, None, created=True)

    return Later(answer)


def _answer_refused(
    conn: Connection, key: dict[str, object], digest: bytes, refusal: OverloadedError | None
) -> Accepted:
    """Return the answer to the first request of this key, or raise the reason why there is none."""
    sampling_session_id = key["sampling_session_id"]
    row = conn.execute(_FIRST_OF_KEY, key).one_or_none()
    if row is None:
        raise NotFoundError(f"no sampling session {sampling_session_id}")
    if row.request_id is None:
        session_records.check_live(row)
        raise refusal or NotFoundError(f"no sampling session {sampling_session_id} at that time")
    name = f"seq_id {key['seq_id']} of sampling session {sampling_session_id}"
    require_same(row, RequestKind.SAMPLE, digest, name)
    return existing_answer(row, None)
