"""Saves of weights as checkpoints."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import Connection

from skyrl_tinker.api.openapi.documents import takes
from skyrl_tinker.api.requests.request_body import json_size, read_json
from skyrl_tinker.api.requests.submission import Body, from_json, submit_training
from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.api.services import CallerDep, Deps, Services
from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.futures import AcceptedFuture
from skyrl_tinker.protocol.schemas.training import SaveExternalRequest, SaveSamplerRequest, SaveWeightsRequest
from skyrl_tinker.protocol.validation.steps import (
    validate_save_external,
    validate_save_sampler,
    validate_save_weights,
)
from skyrl_tinker.store.reports import holdings

router = APIRouter(tags=["weights"])


@router.post(
    "/save_weights",
    summary="Save the training state, optimizer included, under a name",
    openapi_extra=takes(SaveWeightsRequest),
)
async def save_weights(request: Request, deps: Deps, caller: CallerDep) -> AcceptedFuture:
    return await _save(
        request,
        deps,
        caller,
        RequestKind.SAVE_WEIGHTS,
        lambda payload: validate_save_weights(parse(SaveWeightsRequest, payload)),
    )


@router.post(
    "/save_weights_for_sampler",
    summary="Save weights for sampling, named or ephemeral",
    openapi_extra=takes(SaveSamplerRequest),
)
async def save_weights_for_sampler(request: Request, deps: Deps, caller: CallerDep) -> AcceptedFuture:
    return await _save(
        request,
        deps,
        caller,
        RequestKind.SAVE_WEIGHTS_FOR_SAMPLER,
        lambda payload: validate_save_sampler(parse(SaveSamplerRequest, payload)),
    )


@router.post(
    "/save_weights_external",
    summary="Export weights: a PEFT adapter or a Hugging Face model",
    openapi_extra=takes(SaveExternalRequest),
)
async def save_weights_external(request: Request, deps: Deps, caller: CallerDep) -> AcceptedFuture:
    return await _save(
        request,
        deps,
        caller,
        RequestKind.SAVE_WEIGHTS_EXTERNAL,
        lambda payload: validate_save_external(parse(SaveExternalRequest, payload)),
    )


async def _save(
    request: Request,
    deps: Services,
    caller: Caller,
    kind: RequestKind,
    check: Callable[[Mapping[str, Any]], Body],
) -> AcceptedFuture:
    payload = await read_json(request)

    def admit(conn: Connection) -> None:
        caller.limits.require_metadata(json_size(payload.get("user_metadata")))
        if caller.limits.stored_gb is not None and payload.get("path") is not None:
            caller.limits.require_stored(holdings.stored_bytes(conn, caller.owner))

    return await submit_training(deps, caller, from_json(kind, payload, check), admit)
