"""Training requests as the engine reads them from the journal."""

from skyrl_tinker.domain.ids import FutureStatus, ModelKey, OwnerId, RequestId, RequestKind, SessionId
from skyrl_tinker.store.futures.queue import QueuedRow


def queued(
    number: int,
    model: ModelKey,
    seq_id: int,
    kind: RequestKind = RequestKind.FORWARD_BACKWARD,
    *,
    tokens: int = 10,
    session: str = "session",
    owner: OwnerId | None = None,
    status: FutureStatus = FutureStatus.PENDING,
) -> QueuedRow:
    """`number`: the journal's, in order of arrival. `tokens`: about how many a pass has."""
    return QueuedRow(
        id=number,
        request_id=RequestId(str(number)),
        kind=kind,
        session_id=SessionId(session),
        owner_id=owner,
        model_key=model,
        sampling_session_id=None,
        seq_id=seq_id,
        status=status,
        body_bytes=16 * tokens,
        created_at=0.0,
    )
