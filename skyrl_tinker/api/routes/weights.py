"""Saves: weights become checkpoints."""

from fastapi import APIRouter, Request

from skyrl_tinker.api.bodies import read_json
from skyrl_tinker.api.deps import Deps, Owner
from skyrl_tinker.api.documents import takes
from skyrl_tinker.api.submit import from_json, submit_training
from skyrl_tinker.wire.ids import RequestKind
from skyrl_tinker.wire.models import (
    AcceptedFuture,
    SaveSamplerRequest,
    SaveWeightsRequest,
    parse,
)
from skyrl_tinker.wire.validate import validate_save_sampler, validate_save_weights

router = APIRouter(tags=["weights"])


@router.post(
    "/save_weights",
    summary="Save the training state, optimizer included, under a name",
    openapi_extra=takes(SaveWeightsRequest),
)
async def save_weights(request: Request, deps: Deps, owner: Owner) -> AcceptedFuture:
    wanted = from_json(
        RequestKind.SAVE_WEIGHTS,
        await read_json(request),
        lambda payload: validate_save_weights(parse(SaveWeightsRequest, payload)),
    )
    return await submit_training(deps, owner, wanted)


@router.post(
    "/save_weights_for_sampler",
    summary="Weights to the samplers, named or ephemeral",
    openapi_extra=takes(SaveSamplerRequest),
)
async def save_weights_for_sampler(request: Request, deps: Deps, owner: Owner) -> AcceptedFuture:
    wanted = from_json(
        RequestKind.SAVE_WEIGHTS_FOR_SAMPLER,
        await read_json(request),
        lambda payload: validate_save_sampler(parse(SaveSamplerRequest, payload)),
    )
    return await submit_training(deps, owner, wanted)
