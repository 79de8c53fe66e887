"""Checkpoints: lists, publication, time to live, deletion, copies."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from sqlalchemy import Connection
from starlette.responses import Response

from skyrl_tinker.api.openapi.documents import takes
from skyrl_tinker.api.requests.model_requests import find_own_checkpoint
from skyrl_tinker.api.requests.request_body import read_as, read_model
from skyrl_tinker.api.requests.responses import json_by_parts
from skyrl_tinker.api.resources import weight_copies
from skyrl_tinker.api.resources.run_views import checkpoint
from skyrl_tinker.api.services import CallerDep, Deps, Owner, Reached, Services
from skyrl_tinker.domain.ids import CheckpointKind, ModelId, Reach, RequestKind
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.runs import (
    CheckpointsResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    Cursor,
    Paging,
    SetTtlRequest,
)
from skyrl_tinker.protocol.stored_requests import payload_digest
from skyrl_tinker.protocol.validation.steps import validate_ttl
from skyrl_tinker.store import audit_log, checkpoint_records
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.store.reports import training_runs

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})", re.ASCII)
_KNOWS_EXTERNAL = (0, 28)
"""First SDK version that reads checkpoints of kind external_weights."""

router = APIRouter(tags=["checkpoints"])
_OF_RUN = "/training_runs/{run}/checkpoints"


@router.get("/checkpoints", summary="Your checkpoints, newest first", response_model=CheckpointsResponse)
async def list_checkpoints(
    query: Annotated[Paging, Query()], request: Request, deps: Deps, reach: Reached
) -> Response:
    page = await deps.store.report(
        lambda conn: training_runs.page_checkpoints(conn, reach, _kinds(request), query.limit, query.offset),
        reach,
    )
    cursor = Cursor(offset=query.offset, limit=query.limit, total_count=page.total)
    answer = CheckpointsResponse(checkpoints=[], cursor=cursor)
    return await json_by_parts(deps.store, reach, answer, "checkpoints", page.keys, _listed)


@router.get(
    _OF_RUN, summary="The checkpoints of a training run, oldest first", response_model=CheckpointsResponse
)
@router.get(
    "/models/{run}/checkpoints",
    summary="The same list under the path of SDK 0.3",
    response_model=CheckpointsResponse,
)
async def list_checkpoints_of_run(run: str, request: Request, deps: Deps, reach: Reached) -> Response:
    """Another owner's run shows its published checkpoints only."""
    ids = await deps.store.report(
        lambda conn: training_runs.list_checkpoints(conn, reach, ModelId(run), _kinds(request)), reach
    )
    answer = CheckpointsResponse(checkpoints=[])
    return await json_by_parts(deps.store, reach, answer, "checkpoints", ids, _listed)


def _listed(conn: Connection, ids: Sequence[int]) -> list[str]:
    return [checkpoint(row).model_dump_json() for row in training_runs.checkpoints_of(conn, ids)]


def _kinds(request: Request) -> list[CheckpointKind]:
    """Return the kinds that the client's SDK knows: older ones crash on an unknown kind."""
    version = _VERSION.match(request.headers.get("x-stainless-package-version", ""))
    if version is not None and (int(version[1]), int(version[2])) < _KNOWS_EXTERNAL:
        return [CheckpointKind.WEIGHTS, CheckpointKind.SAMPLER_WEIGHTS]
    return list(CheckpointKind)


@router.post(_OF_RUN + "/{kind}/{name}/publish", summary="Let every owner load and sample a checkpoint")
async def publish(run: str, kind: str, name: str, deps: Deps, owner: Owner) -> dict[str, str]:
    """Idempotent: a 409 would make the SDK repeat the request for minutes."""
    return await _change(deps, owner, run, f"{kind}/{name}", partial(checkpoint_records.publish, public=True))


@router.delete(_OF_RUN + "/{kind}/{name}/publish", summary="Make a checkpoint private again")
async def unpublish(run: str, kind: str, name: str, deps: Deps, owner: Owner) -> dict[str, str]:
    """Idempotent. Sampling sessions that use the checkpoint go on."""
    return await _change(
        deps, owner, run, f"{kind}/{name}", partial(checkpoint_records.publish, public=False)
    )


@router.put(
    _OF_RUN + "/{kind}/{name}/ttl", **takes("Set when a checkpoint expires, counted from now", SetTtlRequest)
)
async def set_ttl(
    run: str, kind: str, name: str, request: Request, deps: Deps, owner: Owner
) -> dict[str, str]:
    ttl_seconds = validate_ttl((await read_model(request, SetTtlRequest)).ttl_seconds)
    change = partial(checkpoint_records.set_ttl, ttl_seconds=ttl_seconds)
    return await _change(deps, owner, run, f"{kind}/{name}", change)


@router.delete(_OF_RUN + "/{checkpoint_id:path}", summary="Delete a checkpoint")
async def delete_checkpoint(
    run: str, checkpoint_id: str, deps: Deps, reach: Reached, owner: Owner
) -> dict[str, str]:
    def delete(conn: Connection, row: CheckpointRow) -> None:
        checkpoint_records.delete(conn, row)
        audit_log.record_admin(conn, reach, owner, "delete", tinker_path=row.path)

    await _change(deps, reach, run, checkpoint_id, delete)
    deps.bell.ring("engine")  # which removes the directory
    return {}


async def _change(
    deps: Services, reach: Reach, run: str, checkpoint_id: str, change: Callable[..., None]
) -> dict[str, str]:
    await deps.store.write(lambda conn: change(conn, find_own_checkpoint(conn, reach, run, checkpoint_id)))
    return {}


@router.post(
    "/copy_weights",
    **takes("Copy a checkpoint into a project, or into a session of yours", CopyWeightsRequest),
)
async def copy_weights(
    request: Request,
    deps: Deps,
    caller: CallerDep,
    x_idempotency_key: Annotated[str | None, Header()] = None,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> CopyWeightsResponse:
    """Answered once the copy is complete. It shares its files with the original and outlives it."""
    copy, digest = await read_as(
        request,
        lambda payload: (
            parse(CopyWeightsRequest, payload),
            payload_digest(RequestKind.COPY_WEIGHTS, payload),
        ),
    )
    path = await weight_copies.copy_weights(
        deps, caller, copy, digest, x_idempotency_key, x_tinker_weights_access_token
    )
    return CopyWeightsResponse(tinker_path=str(path))
