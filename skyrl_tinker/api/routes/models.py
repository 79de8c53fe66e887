"""Models: made anew or from a checkpoint, loaded in place, and what they are."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import Connection

from skyrl_tinker.api.openapi.documents import takes
from skyrl_tinker.api.requests import model_requests
from skyrl_tinker.api.requests.request_body import read_json, read_model
from skyrl_tinker.api.requests.submission import announce, from_json, submit_training
from skyrl_tinker.api.services import Deps, Owner, Services
from skyrl_tinker.domain.ids import ModelId, OwnerId, RequestKind
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.protocol.schemas import (
    AcceptedFuture,
    CreateModelRequest,
    CreateViaLoadRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoadWeightsRequest,
    ModelData,
    UnloadModelRequest,
    WeightsInfoRequest,
    WeightsInfoResponse,
    parse,
)
from skyrl_tinker.protocol.validation import validate_load_weights
from skyrl_tinker.store import model_records
from skyrl_tinker.store.futures import cancellation
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.model_records import ModelRow

router = APIRouter(tags=["models"])


@router.post(
    "/create_model",
    summary="A new model on the base model: LoRA, or full parameters with rank 0",
    openapi_extra=takes(CreateModelRequest),
)
async def create_model(request: Request, deps: Deps, owner: Owner) -> AcceptedFuture:
    payload = await read_json(request)
    made = model_requests.anew(parse(CreateModelRequest, payload), payload, deps.limits)
    accepted = await deps.store.write(lambda conn: made.submit(conn, owner), deps.wake_engine)
    return announce(deps, owner, accepted, pending=made.failure is None)


@router.post(
    "/load_weights",
    summary="A new model from a checkpoint, or with `model_id` a load in place",
    openapi_extra=takes(CreateViaLoadRequest, LoadWeightsRequest),
)
async def load_weights(request: Request, deps: Deps, owner: Owner) -> AcceptedFuture:
    payload = await read_json(request)
    if payload.get("model_id") is None:
        return await _create_via_load(deps, owner, payload)
    wanted = from_json(
        RequestKind.LOAD_WEIGHTS,
        payload,
        lambda payload: validate_load_weights(parse(LoadWeightsRequest, payload)),
    )
    return await submit_training(deps, owner, wanted)


async def _create_via_load(
    deps: Services, owner: OwnerId | None, payload: Mapping[str, Any]
) -> AcceptedFuture:
    wanted = parse(CreateViaLoadRequest, payload)

    def create(conn: Connection) -> tuple[model_requests.Creation, Accepted]:
        made = model_requests.from_checkpoint(conn, owner, wanted, payload, deps.limits)
        return made, made.submit(conn, owner)

    made, accepted = await deps.store.write(create, deps.wake_engine)
    return announce(deps, owner, accepted, pending=made.failure is None)


@router.post(
    "/unload_model",
    summary="Release a model, behind all requests of it that came before",
    openapi_extra=takes(UnloadModelRequest),
)
async def unload_model(request: Request, deps: Deps, owner: Owner) -> AcceptedFuture:
    """Its checkpoints and sampling clients stay. Requests that come later fail."""
    wanted = await read_model(request, UnloadModelRequest)
    model_id = ModelId(wanted.model_id)
    accepted = await deps.store.write(
        lambda conn: cancellation.submit_unload(conn, owner, model_id), deps.wake_engine
    )
    return announce(deps, owner, accepted, pending=True)


@router.post(
    "/get_info",
    summary="What a model is made of; works from its creation on",
    openapi_extra=takes(GetInfoRequest),
)
async def get_info(request: Request, deps: Deps, owner: Owner) -> GetInfoResponse:
    wanted = await read_model(request, GetInfoRequest)
    with deps.store.read() as conn:
        row = model_records.find(conn, owner, ModelId(wanted.model_id))
    if row is None:
        raise NotFoundError(f"no model {wanted.model_id}")
    return _info(row, deps.facts)


def _info(row: ModelRow, facts: BaseModelFacts) -> GetInfoResponse:
    return GetInfoResponse(
        model_id=row.model_id,
        model_data=ModelData(
            model_name=row.base_model, tokenizer_id=facts.directory, arch=facts.architecture
        ),
        is_lora=row.spec.rank > 0,
        lora_rank=row.spec.rank or None,
        model_name=row.base_model,
        optimizer_config=dict(row.optimizer_config),
    )


@router.post("/weights_info", summary="What a checkpoint holds", openapi_extra=takes(WeightsInfoRequest))
async def weights_info(request: Request, deps: Deps, owner: Owner) -> WeightsInfoResponse:
    wanted = await read_model(request, WeightsInfoRequest)
    with deps.store.read() as conn:
        row = model_requests.find_checkpoint(conn, owner, wanted.tinker_path)
    return WeightsInfoResponse(
        base_model=row.base_model,
        is_lora=row.spec.rank > 0,
        lora_rank=row.spec.rank or None,
        train_unembed=row.spec.train_unembed,
        train_mlp=row.spec.train_mlp,
        train_attn=row.spec.train_attn,
        optimizer_config=dict(row.optimizer_config),
    )
