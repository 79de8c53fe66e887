"""Saves, and the checkpoints of training runs."""

from fastapi import APIRouter, Request
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.api import runs
from skyrl_tinker.api.bodies import read_json
from skyrl_tinker.api.deps import Deps, Owner
from skyrl_tinker.api.submit import from_json, submit_training
from skyrl_tinker.store import checkpoints
from skyrl_tinker.wire import paths
from skyrl_tinker.wire.ids import ModelId, RequestKind
from skyrl_tinker.wire.models import (
    AcceptedFuture,
    SaveSamplerRequest,
    SaveWeightsRequest,
    TrainingRun,
    parse,
)
from skyrl_tinker.wire.validate import validate_save_sampler, validate_save_weights

router = APIRouter(tags=["weights"])


@router.post("/save_weights", summary="Save the training state, optimizer included, under a name")
async def save_weights(request: Request, deps: Deps, owner: Owner) -> AcceptedFuture:
    wanted = from_json(
        RequestKind.SAVE_WEIGHTS,
        await read_json(request),
        lambda payload: validate_save_weights(parse(SaveWeightsRequest, payload)),
    )
    return await submit_training(deps, owner, wanted)


@router.post("/save_weights_for_sampler", summary="Weights to the samplers, named or ephemeral")
async def save_weights_for_sampler(request: Request, deps: Deps, owner: Owner) -> AcceptedFuture:
    wanted = from_json(
        RequestKind.SAVE_WEIGHTS_FOR_SAMPLER,
        await read_json(request),
        lambda payload: validate_save_sampler(parse(SaveSamplerRequest, payload)),
    )
    return await submit_training(deps, owner, wanted)


@router.get("/training_runs/{run}", summary="A training run (a model) and its last checkpoints")
async def training_run(run: str, deps: Deps) -> TrainingRun:
    async with deps.store.read() as conn:
        return await runs.training_run(conn, ModelId(run))


@router.delete("/training_runs/{run}/checkpoints/{checkpoint_id:path}", summary="Delete a checkpoint")
async def delete_checkpoint(run: str, checkpoint_id: str, deps: Deps) -> dict[str, str]:
    where = paths.parse_checkpoint_id(ModelId(run), checkpoint_id)

    async def delete(conn: AsyncConnection) -> None:
        await checkpoints.delete(conn, where.model_id, where.kind, where.name)

    await deps.store.write(delete)
    deps.bell.ring("engine")  # which removes the directory
    return {}
