"""create_custom_loss. An invalid loss is stored as a failed future, because its number is used."""

from collections.abc import Mapping
from typing import Any

from skyrl_tinker.domain.ids import RequestKind, SessionId
from skyrl_tinker.domain.values import CustomLoss, Failure
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.custom_loss import check_custom_loss
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.losses import CreateCustomLossRequest
from skyrl_tinker.protocol.stored_requests import payload_digest
from skyrl_tinker.store.custom_losses import NewLoss


def read_upload(payload: Mapping[str, Any]) -> NewLoss:
    """Read and check the request. UserError if it has another form; then nothing is stored."""
    message = parse(CreateCustomLossRequest, payload)
    loss: CustomLoss | Failure
    try:
        loss = check_custom_loss(message)
    except UserError as error:
        loss = Failure(str(error), error.category)
    digest = payload_digest(RequestKind.CREATE_CUSTOM_LOSS, payload)
    return NewLoss(SessionId(message.session_id), message.custom_loss_seq_id, loss, digest)
