"""Keys of all owners, and base models on demand, for administrators. Each change is in the audit log."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import JSONResponse, Response

from skyrl_tinker.api.openapi.documents import takes
from skyrl_tinker.api.requests.request_body import read_model
from skyrl_tinker.api.requests.responses import json_from_rows
from skyrl_tinker.api.resources.key_administration import overview, require_admin, require_other
from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.api.services import CallerDep, Deps, Services
from skyrl_tinker.api.waiting.engine_client import EngineUnavailableError
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.administration import (
    AdminResponse,
    AdoptRequest,
    AdoptResponse,
    ChangeBaseRequest,
    ChangeBaseResponse,
    CreateKeyRequest,
    KeyLimitsResponse,
    LimitKeyRequest,
    NewSecretResponse,
    RotateKeyRequest,
)
from skyrl_tinker.protocol.schemas.base import MAX_INT64
from skyrl_tinker.protocol.validation.key_limits import changes_of
from skyrl_tinker.store import api_keys, audit_log
from skyrl_tinker.store.database.group_commit import Op, T

KeyId = Annotated[int, Path(ge=1, le=MAX_INT64)]
router = APIRouter(tags=["console"], prefix="/console/admin")


def on_demand(settings: Settings, bases: Bases, name: str) -> str:
    """Return the canonical name of a base model on demand. Raises UserError for others, with what to do."""
    facts = bases.require(name)
    if settings.idle_s_of(facts.name) is not None:
        return facts.name
    others = [each.name for each in bases.all if settings.idle_s_of(each.name) is not None]
    only = ", ".join(others) or "there is none"
    if facts == bases.first:
        raise UserError(
            f"base_model: found {name!r}, which always runs as the first one, expected one on demand: {only}"
        )
    raise UserError(
        f"base_model: found {name!r}, which always runs, expected one on demand: {only}; set start = "
        f'"on_demand" in its table of bases, and start the server again'
    )


@router.get("", summary="Keys, their limits, and their owners' holdings", response_model=AdminResponse)
async def list_keys(deps: Deps, caller: CallerDep) -> Response:
    require_admin(caller)
    limits, now = deps.keys.limits, deps.store.now()
    return await json_from_rows(deps.store, caller.reach, lambda conn: overview(conn, limits, now))


@router.post("/keys", response_model=NewSecretResponse, **takes("Create a key", CreateKeyRequest))
async def create_key(request: Request, deps: Deps, caller: CallerDep) -> JSONResponse:
    require_admin(caller)
    new = await read_model(request, CreateKeyRequest)
    make = partial(api_keys.create, name=new.name, admin=new.admin)
    return await _new_secret(deps, caller, new.expires_in_s, make)


@router.post(
    "/keys/{key}/rotate",
    response_model=NewSecretResponse,
    **takes("Give a key a new secret", RotateKeyRequest),
)
async def rotate_key(key: KeyId, request: Request, deps: Deps, caller: CallerDep) -> JSONResponse:
    require_admin(caller)
    require_other(caller, key)
    new = await read_model(request, RotateKeyRequest)
    make = partial(api_keys.rotate, id_or_name=str(key), overlap_s=new.overlap_s)
    return await _new_secret(deps, caller, new.expires_in_s, make)


@router.put("/keys/{key}/limits", **takes("Change the limits of a key", LimitKeyRequest))
async def limit_key(key: KeyId, request: Request, deps: Deps, caller: CallerDep) -> KeyLimitsResponse:
    require_admin(caller)
    require_other(caller, key)
    changes = changes_of((await read_model(request, LimitKeyRequest)).limits)
    limits = await _change(deps, lambda conn: api_keys.limit(conn, str(key), changes, caller.name))
    return KeyLimitsResponse(limits=dict(limits))


@router.post(
    "/keys/{key}/adopt",
    response_model=AdoptResponse,
    **takes("Give a key all that a revoked or expired one made", AdoptRequest),
)
async def adopt(key: KeyId, request: Request, deps: Deps, caller: CallerDep) -> JSONResponse:
    require_admin(caller)
    require_other(caller, key)
    former = (await read_model(request, AdoptRequest)).former
    count = await _change(deps, lambda conn: api_keys.adopt(conn, str(key), former, caller.name))
    return JSONResponse(AdoptResponse(sessions=count).model_dump())


@router.delete("/keys/{key}", summary="Revoke a key; its work stays")
async def revoke_key(key: KeyId, deps: Deps, caller: CallerDep) -> dict[str, str]:
    require_admin(caller)
    require_other(caller, key)
    await _change(deps, lambda conn: api_keys.revoke(conn, str(key), caller.name))
    return {}


@router.post(
    "/bases",
    response_model=ChangeBaseResponse,
    **takes("Start or stop a base model on demand; nothing under way is cut", ChangeBaseRequest),
)
async def change_base(request: Request, deps: Deps, caller: CallerDep) -> JSONResponse:
    require_admin(caller, keyless=True)
    asked = await read_model(request, ChangeBaseRequest)
    name = on_demand(deps.settings, deps.bases, asked.base_model)
    details = {"by": caller.name, "base_model": name}
    body = ChangeBaseRequest(base_model=name, action=asked.action).model_dump_json().encode()
    refusal = None
    try:
        told = await deps.engine.ask("/bases", body)
    except EngineUnavailableError:
        refusal = await deps.engine.refusal()
        details["error"] = str(refusal)
    await deps.store.write(lambda conn: audit_log.record_key(conn, f"base_{asked.action}", None, **details))
    if refusal is not None:
        raise refusal
    return JSONResponse(ChangeBaseResponse(base_model=name, detail=told.decode()).model_dump())


async def _change(deps: Services, op: Op[T]) -> T:
    """Commit a change, which holds in this process at once and in others within a second."""
    value = await deps.store.write(op)
    await deps.keys.refresh()
    return value


async def _new_secret(
    deps: Services, caller: Caller, expires_in_s: float | None, make: Callable[..., str]
) -> JSONResponse:
    expires_at = None if expires_in_s is None else deps.store.now() + expires_in_s
    key = await _change(deps, partial(make, expires_at=expires_at, by=caller.name))
    return JSONResponse(NewSecretResponse(key=key).model_dump(), headers={"Cache-Control": "no-store"})
