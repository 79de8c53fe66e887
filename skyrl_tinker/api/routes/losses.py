"""Custom losses: uploaded here, executed by the trainer."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from skyrl_tinker.api.openapi.documents import takes
from skyrl_tinker.api.requests.request_body import read_as
from skyrl_tinker.api.requests.submission import announce
from skyrl_tinker.api.services import Deps, Owner
from skyrl_tinker.domain.ids import RequestKind, SessionId
from skyrl_tinker.domain.values import CustomLoss, Failure
from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.protocol.custom_loss import check_custom_loss
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.futures import AcceptedFuture
from skyrl_tinker.protocol.schemas.losses import CreateCustomLossRequest, CreateCustomLossResult
from skyrl_tinker.protocol.stored_requests import payload_digest
from skyrl_tinker.store.custom_losses import NewLoss
from skyrl_tinker.store.futures.training_submission import submit_custom_loss

router = APIRouter(tags=["losses"])


@router.post(
    "/create_custom_loss",
    **takes("Upload a loss recorded by torch.fx, for passes of the same session", CreateCustomLossRequest),
)
async def create_custom_loss(request: Request, deps: Deps, owner: Owner) -> AcceptedFuture:
    if not deps.settings.sdk.custom_loss_server_side:
        raise NotSupportedError(
            "custom losses run on the client (the server's setting sdk.custom_loss_server_side is off)"
        )
    new = await read_as(request, _read_upload)
    result = CreateCustomLossResult(loss_id=new.loss_id).model_dump_json().encode()
    accepted = await deps.store.write(lambda conn: submit_custom_loss(conn, new, owner, result))
    return announce(deps, owner, accepted, pending=False)


def _read_upload(payload: Mapping[str, Any]) -> NewLoss:
    """Read and check the request. UserError if it has another form; then nothing is stored."""
    message = parse(CreateCustomLossRequest, payload)
    loss: CustomLoss | Failure
    try:
        loss = check_custom_loss(message)
    except UserError as error:
        loss = Failure(str(error), error.category)
    digest = payload_digest(RequestKind.CREATE_CUSTOM_LOSS, payload)
    return NewLoss(SessionId(message.session_id), message.custom_loss_seq_id, loss, digest)
