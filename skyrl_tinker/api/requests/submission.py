"""Submission of training requests. An invalid one is stored as failed, because its seq_id is used."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.api.services import Services
from skyrl_tinker.domain.ids import ModelId, OwnerId, RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.futures import AcceptedFuture
from skyrl_tinker.protocol.schemas.training import TrainingEnvelope
from skyrl_tinker.protocol.stored_requests import payload_digest
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.futures import training_submission
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.training_submission import Submission


class Body(Protocol):
    def to_bytes(self) -> bytes: ...


def from_json(
    kind: RequestKind, payload: Mapping[str, Any], check: Callable[[Mapping[str, Any]], Body]
) -> Submission:
    """Read a JSON request; a UserError of `check` becomes the failure of its future.

    Raises UserError only when model_id or seq_id cannot be read.
    """
    envelope = parse(TrainingEnvelope, payload)
    body, failure = body_or_failure(lambda: check(payload).to_bytes())
    digest = payload_digest(kind, payload)
    return Submission(kind, ModelId(envelope.model_id), envelope.seq_id, digest, body, failure)


def body_or_failure(make: Callable[[], bytes]) -> tuple[bytes, Failure | None]:
    try:
        return make(), None
    except UserError as error:
        return b"", Failure(str(error), error.category)


async def submit_training(
    services: Services, caller: Caller, submission: Submission, admit: Op[None] | None = None
) -> AcceptedFuture:
    """Store the request and wake the engine; a repeated request gets the future of the first one.

    A KeyLimitError of `admit` fails it. Raises OverloadedError above the backlog of the caller's key.
    """
    owner = caller.owner
    refusal = await services.backlogs.full(caller)
    accepted: Accepted = await services.store.write(
        lambda conn: training_submission.submit_training(
            conn, submission, owner=owner, admit=admit, refusal=refusal
        ),
        services.wake_engine,
        len(submission.body),
    )
    return announce(services, owner, accepted, pending=submission.failure is None)


def announce(
    services: Services, owner: OwnerId | None, accepted: Accepted, *, pending: bool
) -> AcceptedFuture:
    """Return the client's answer; if the result is stored already, ring the API processes."""
    if not pending:
        services.bell.ring("api")
    elif accepted.created:
        services.waiter.expect(accepted.request_id, owner)
    return AcceptedFuture(
        request_id=accepted.request_id,
        model_id=accepted.model_id,
        sample_sequence_ids=list(accepted.sequence_ids) or None,
    )
