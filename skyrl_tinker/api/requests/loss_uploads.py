"""Losses to be kept. A wrong one becomes a promise that is born failed: its number is taken."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import OwnerId, RequestKind, SessionId
from skyrl_tinker.domain.values import CustomLoss, Failure
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.custom_loss import check_custom_loss
from skyrl_tinker.protocol.schemas import CreateCustomLossRequest, CreateCustomLossResult, parse
from skyrl_tinker.protocol.stored_requests import payload_digest
from skyrl_tinker.store.custom_losses import NewLoss
from skyrl_tinker.store.futures import training_submission
from skyrl_tinker.store.futures.record import Accepted


@dataclass(frozen=True, slots=True)
class Upload:
    loss: NewLoss
    digest: bytes
    failure: Failure | None

    def submit(self, conn: Connection, owner: OwnerId | None) -> Accepted:
        result = CreateCustomLossResult(loss_id=self.loss.loss_id).model_dump_json().encode()
        return training_submission.submit_custom_loss(
            conn, self.loss, owner=owner, digest=self.digest, result=result, failure=self.failure
        )


def read(payload: Mapping[str, Any]) -> Upload:
    """create_custom_loss. Raises UserError when the request has another form, and nothing is kept of it."""
    wanted = parse(CreateCustomLossRequest, payload)
    loss, failure = _checked(wanted)
    new = NewLoss(SessionId(wanted.session_id), wanted.custom_loss_seq_id, loss)
    return Upload(new, payload_digest(RequestKind.CREATE_CUSTOM_LOSS, payload), failure)


def _checked(wanted: CreateCustomLossRequest) -> tuple[CustomLoss | None, Failure | None]:
    try:
        return check_custom_loss(wanted), None
    except UserError as error:
        return None, Failure(str(error), error.category)
