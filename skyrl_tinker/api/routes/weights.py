"""Saves of weights as checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from sqlalchemy import Connection

from skyrl_tinker.api.openapi.documents import takes
from skyrl_tinker.api.requests.request_body import read_as, require_metadata
from skyrl_tinker.api.requests.submission import Body, body_or_failure, from_json, submit_training
from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.api.services import CallerDep, Deps, Services
from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.protocol.schemas.base import Message, parse
from skyrl_tinker.protocol.schemas.futures import AcceptedFuture
from skyrl_tinker.protocol.schemas.training import SaveExternalRequest, SaveSamplerRequest, SaveWeightsRequest
from skyrl_tinker.protocol.stored_requests import SaveExternalBody, SaveSamplerBody, SaveWeightsBody
from skyrl_tinker.protocol.validation.steps import (
    validate_save_external,
    validate_save_sampler,
    validate_save_weights,
)
from skyrl_tinker.store.futures.training_submission import Submission
from skyrl_tinker.store.reports import holdings

M = TypeVar("M", bound=Message)
router = APIRouter(tags=["weights"])


@router.post(
    "/save_weights", **takes("Save the training state, optimizer included, under a name", SaveWeightsRequest)
)
async def save_weights(request: Request, deps: Deps, caller: CallerDep) -> AcceptedFuture:
    kind = RequestKind.SAVE_WEIGHTS
    return await _save(request, deps, caller, kind, SaveWeightsRequest, validate_save_weights)


@router.post(
    "/save_weights_for_sampler", **takes("Save weights for sampling, named or ephemeral", SaveSamplerRequest)
)
async def save_weights_for_sampler(request: Request, deps: Deps, caller: CallerDep) -> AcceptedFuture:
    kind = RequestKind.SAVE_WEIGHTS_FOR_SAMPLER
    return await _save(request, deps, caller, kind, SaveSamplerRequest, validate_save_sampler)


@router.post(
    "/save_weights_external",
    **takes("Export weights: a PEFT adapter or a Hugging Face model", SaveExternalRequest),
)
async def save_weights_external(request: Request, deps: Deps, caller: CallerDep) -> AcceptedFuture:
    kind = RequestKind.SAVE_WEIGHTS_EXTERNAL
    return await _save(request, deps, caller, kind, SaveExternalRequest, validate_save_external)


async def _save(
    request: Request,
    deps: Services,
    caller: Caller,
    kind: RequestKind,
    model: type[M],
    check: Callable[[M], SaveWeightsBody | SaveExternalBody | SaveSamplerBody],
) -> AcceptedFuture:
    def check_within(payload: Mapping[str, Any]) -> Body:
        require_metadata(caller.limits, payload)
        body = check(parse(model, payload))
        if body.name is None or body.ttl_seconds is not None:
            return body
        return replace(body, ttl_seconds=deps.settings.retention.checkpoints_s)

    def make(payload: Mapping[str, Any]) -> tuple[Submission, bool]:
        return from_json(kind, payload, check_within), payload.get("path") is not None

    def admit(conn: Connection) -> None:
        if caller.limits.stored_gb is not None and named:
            caller.limits.require_stored(holdings.stored_bytes(conn, caller.owner))

    submission, named = await read_as(request, make)
    if not named:
        submission = await _sampled_here(deps, submission)
    return await submit_training(deps, caller, submission, admit)


async def _sampled_here(deps: Services, submission: Submission) -> Submission:
    """Have an unnamed save fail if its base model is not sampled here: nobody could use the weights."""
    limits = await deps.limits.of_model(submission.model_id)
    if submission.failure is not None or isinstance(limits, Failure):
        return submission

    def check() -> bytes:
        deps.bases.require_sampled(limits.base_model)
        return submission.body

    body, failure = body_or_failure(check)
    return replace(submission, body=body, failure=failure)
