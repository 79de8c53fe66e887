"""Training requests: passes and optimizer steps."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from fastapi import APIRouter, Request

from skyrl_tinker.api.middleware.fast_routes import FastRoute
from skyrl_tinker.api.openapi.documents import takes, takes_pass
from skyrl_tinker.api.requests.request_body import json_object, read_as
from skyrl_tinker.api.requests.submission import body_or_failure, from_json, submit_training
from skyrl_tinker.api.services import Deps, Services, caller_of
from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.errors import TooLargeError, UserError
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.protocol.protobuf.json_passes import ForwardBackwardJson, ForwardJson
from skyrl_tinker.protocol.protobuf.pass_requests import RawForwardBackward
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.futures import AcceptedFuture
from skyrl_tinker.protocol.schemas.training import OptimStepRequest
from skyrl_tinker.protocol.stored_requests import OptimStepBody, body_digest
from skyrl_tinker.protocol.validation.limits import Limits
from skyrl_tinker.protocol.validation.steps import validate_optim_step
from skyrl_tinker.protocol.validation.training import validate_forward_backward
from skyrl_tinker.store.futures.training_submission import Submission
from skyrl_tinker.system.off_loop import OFF_LOOP_BYTES, off_loop

router = APIRouter(tags=["training"], route_class=FastRoute)


@router.post(
    "/forward_backward",
    **takes_pass("A pass over data, with gradients or `forward_only`", ForwardBackwardJson),
)
@router.post("/forward", **takes_pass("A pass without gradients, as SDKs up to 0.24 send it", ForwardJson))
async def forward_backward(request: Request, deps: Deps) -> AcceptedFuture:
    size = int(request.headers["content-length"])  # set by the middleware
    async with deps.gate if size > OFF_LOOP_BYTES else nullcontext():
        submission = await _read_pass(request, deps)
        return await submit_training(deps, caller_of(request), submission)


@router.post(
    "/optim_step", **takes("One optimizer step over the gradients accumulated so far", OptimStepRequest)
)
async def optim_step(request: Request, deps: Deps) -> AcceptedFuture:
    submission = await read_as(
        request, lambda payload: from_json(RequestKind.OPTIM_STEP, payload, _checked_step)
    )
    return await submit_training(deps, caller_of(request), submission)


def _checked_step(payload: Mapping[str, Any]) -> OptimStepBody:
    try:
        return validate_optim_step(parse(OptimStepRequest, payload))
    except UserError as error:
        raise UserError(
            f"{error}; the step failed, so the gradients accumulated for it are dropped"
        ) from error


async def _read_pass(request: Request, deps: Services) -> Submission:
    """Decode, check, and convert to the stored form, in threads when the body is large."""
    protobuf = "protobuf" in request.headers.get("content-type", "").lower()
    refused: str | None = request.scope.get("refused")
    body = await request.body()
    raw = await off_loop(len(body), lambda: _decode(body, protobuf, refused))
    limits = await deps.limits.of_model(raw.model_id)
    return await off_loop(len(body), lambda: _check_pass(raw, limits))


def _decode(body: bytes, protobuf: bool, refused: str | None) -> RawForwardBackward:
    """`refused`: the reason why `body` is only the beginning of a refused body."""
    if refused is not None:
        return _refused_pass(body, refused)
    if protobuf:
        return pass_requests.decode_forward_backward(body)
    # Its values are float32 or int64: nothing else is in a pass, and fractions have many digits.
    return pass_requests.decode_forward_backward_json(json_object(body, exact=False))


def _check_pass(raw: RawForwardBackward, limits: Limits | Failure) -> Submission:
    canonical = pass_requests.canonical(raw)
    stored, failure = (
        (b"", limits)
        if isinstance(limits, Failure)
        else body_or_failure(lambda: _checked(raw, canonical, limits))
    )
    kind = RequestKind.FORWARD if raw.forward_only else RequestKind.FORWARD_BACKWARD
    return Submission(kind, raw.model_id, raw.seq_id, body_digest(canonical), stored, failure)


def _refused_pass(body: bytes, reason: str) -> RawForwardBackward:
    """Return a pass that fails with `reason`. Raises TooLargeError if its seq_id cannot be read."""
    if (head := pass_requests.decode_head(body, TooLargeError(reason))) is None:
        raise TooLargeError(reason)
    return head


def _checked(raw: RawForwardBackward, canonical: bytes, limits: Limits) -> bytes:
    validate_forward_backward(raw, limits)
    return canonical
