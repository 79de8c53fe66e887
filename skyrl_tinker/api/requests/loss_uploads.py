"""create_custom_loss. An invalid loss is stored as a failed future, because its number is used."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import OwnerId, RequestKind, SessionId
from skyrl_tinker.domain.values import CustomLoss, Failure
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.custom_loss import check_custom_loss
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.losses import CreateCustomLossRequest, CreateCustomLossResult
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


def read_upload(payload: Mapping[str, Any]) -> Upload:
    """Read and check the request. UserError if it has another form; then nothing is stored."""
    message = parse(CreateCustomLossRequest, payload)
    loss: CustomLoss | None = None
    failure: Failure | None = None
    try:
        loss = check_custom_loss(message)
    except UserError as error:
        failure = Failure(str(error), error.category)
    new = NewLoss(SessionId(message.session_id), message.custom_loss_seq_id, loss)
    return Upload(new, payload_digest(RequestKind.CREATE_CUSTOM_LOSS, payload), failure)
