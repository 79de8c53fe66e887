"""Models: creation, creation from a checkpoint, loads in place, release, description."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import Connection

from skyrl_tinker.api.openapi.documents import takes
from skyrl_tinker.api.requests import model_requests
from skyrl_tinker.api.requests.request_body import read_as, read_model, require_metadata
from skyrl_tinker.api.requests.submission import announce, from_json, submit_training
from skyrl_tinker.api.services import CallerDep, Deps, Owner, Reached, Services
from skyrl_tinker.domain.ids import ModelId, OwnerId, RequestKind
from skyrl_tinker.errors import found
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.futures import AcceptedFuture
from skyrl_tinker.protocol.schemas.runs import WeightsInfoRequest, WeightsInfoResponse
from skyrl_tinker.protocol.schemas.training import (
    CreateModelRequest,
    CreateViaLoadRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoadWeightsRequest,
    ModelData,
    UnloadModelRequest,
)
from skyrl_tinker.protocol.stored_requests import LoadWeightsBody
from skyrl_tinker.protocol.validation.key_limits import KeyLimits
from skyrl_tinker.protocol.validation.steps import validate_load_weights
from skyrl_tinker.store import audit_log, model_records
from skyrl_tinker.store.futures import cancellation
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.training_submission import Creation, Submission

router = APIRouter(tags=["models"])


@router.post(
    "/create_model",
    **takes("A new model on the base model: LoRA, or full parameters with rank 0", CreateModelRequest),
)
async def create_model(request: Request, deps: Deps, owner: Owner, caller: CallerDep) -> AcceptedFuture:
    def make(payload: Mapping[str, Any]) -> Creation:
        require_metadata(caller.limits, payload)
        return model_requests.new_model(parse(CreateModelRequest, payload), payload, deps.limits)

    creation = await read_as(request, make)
    accepted = await deps.store.write(
        lambda conn: model_requests.submit(conn, creation, owner, caller.limits, deps.bases), deps.wake_engine
    )
    return announce(deps, owner, accepted, pending=creation.failure is None)


@router.post(
    "/load_weights",
    **takes(
        "A new model from a checkpoint, or with `model_id` a load in place",
        CreateViaLoadRequest,
        LoadWeightsRequest,
    ),
)
async def load_weights(request: Request, deps: Deps, owner: Owner, caller: CallerDep) -> AcceptedFuture:
    def make(payload: Mapping[str, Any]) -> Submission | tuple[CreateViaLoadRequest, Mapping[str, Any]]:
        if payload.get("model_id") is not None:
            return from_json(RequestKind.LOAD_WEIGHTS, payload, _checked_load)
        require_metadata(caller.limits, payload)
        return parse(CreateViaLoadRequest, payload), payload

    made = await read_as(request, make)
    if isinstance(made, Submission):
        return await submit_training(deps, caller, made)
    return await _create_via_load(deps, owner, caller.limits, *made)


def _checked_load(payload: Mapping[str, Any]) -> LoadWeightsBody:
    return validate_load_weights(parse(LoadWeightsRequest, payload))


async def _create_via_load(
    deps: Services,
    owner: OwnerId | None,
    limits: KeyLimits,
    message: CreateViaLoadRequest,
    payload: Mapping[str, Any],
) -> AcceptedFuture:
    def create(conn: Connection) -> tuple[Creation, Accepted]:
        creation = model_requests.model_from_checkpoint(conn, owner, message, payload, deps.limits)
        return creation, model_requests.submit(conn, creation, owner, limits, deps.bases)

    creation, accepted = await deps.store.write(create, deps.wake_engine)
    return announce(deps, owner, accepted, pending=creation.failure is None)


@router.post("/unload_model", **takes("Release a model after all its earlier requests", UnloadModelRequest))
async def unload_model(request: Request, deps: Deps, reach: Reached, owner: Owner) -> AcceptedFuture:
    """Keep the model's checkpoints and sampling clients; its later requests fail."""
    message = await read_model(request, UnloadModelRequest)
    model_id = ModelId(message.model_id)

    def unload(conn: Connection) -> Accepted:
        audit_log.record_admin(conn, reach, owner, "unload", model_id=model_id)
        return cancellation.submit_unload(conn, reach, model_id)

    accepted = await deps.store.write(unload, deps.wake_engine)
    return announce(deps, owner, accepted, pending=True)


@router.post("/get_info", **takes("Describe a model, from create_model on", GetInfoRequest))
async def get_info(request: Request, deps: Deps, reach: Reached) -> GetInfoResponse:
    message = await read_model(request, GetInfoRequest)
    model = await deps.store.read(lambda conn: model_records.find(conn, reach, ModelId(message.model_id)))
    row = found(model, f"no model {message.model_id}")
    facts = deps.bases.find(row.base_model)
    return GetInfoResponse(
        model_id=row.model_id,
        model_data=ModelData(
            model_name=row.base_model,
            tokenizer_id=row.base_model if facts is None else facts.hub_name or facts.directory,
            arch=None if facts is None else facts.architecture,
        ),
        is_lora=row.spec.rank > 0,
        lora_rank=row.spec.rank or None,
        model_name=row.base_model,
        optimizer_config=dict(row.optimizer_config),
    )


@router.post("/weights_info", **takes("Describe a checkpoint", WeightsInfoRequest))
async def weights_info(request: Request, deps: Deps, reach: Reached) -> WeightsInfoResponse:
    message = await read_model(request, WeightsInfoRequest)
    row = await deps.store.read(lambda conn: model_requests.find_checkpoint(conn, reach, message.tinker_path))
    return WeightsInfoResponse(
        base_model=row.base_model,
        is_lora=row.spec.rank > 0,
        lora_rank=row.spec.rank or None,
        train_unembed=row.spec.train_unembed,
        train_mlp=row.spec.train_mlp,
        train_attn=row.spec.train_attn,
        optimizer_config=dict(row.optimizer_config),
    )
