"""A client's own API key: exchange for a JWT, description, revocation."""

from fastapi import APIRouter

from skyrl_tinker.api.security.tokens import ORGANIZATION
from skyrl_tinker.api.services import CallerDep, Deps
from skyrl_tinker.errors import NotSupportedError
from skyrl_tinker.protocol.schemas.auth import (
    ApiKeyResponse,
    AuthTokenResponse,
    KeyDetails,
    KeyOrganization,
    KeyUser,
)
from skyrl_tinker.store import api_keys

_HOW = "get a key from this server's operator (`skyrl-tinker keys create`) and set TINKER_API_KEY to it"
_NO_KEYS = "this server has no API keys: it accepts any"

router = APIRouter(tags=["auth"], prefix="/auth")
root = APIRouter(tags=["auth"])


@router.post("/token", summary="Exchange the API key for a JWT, which also names its user")
async def auth_token(deps: Deps, caller: CallerDep) -> AuthTokenResponse:
    return AuthTokenResponse(jwt=deps.keys.issue_token(caller))


@router.get("/apikey/me", summary="Describe the API key of this request")
async def api_key(caller: CallerDep) -> ApiKeyResponse:
    """Answered on a server without keys, too, so that `tinker auth login` works with any key."""
    return ApiKeyResponse(
        key_id=caller.owner or 0,
        name=caller.name,
        note="" if caller.owner else _NO_KEYS,
        details=KeyDetails(
            org_details=KeyOrganization(name=ORGANIZATION), user_details=KeyUser(email=caller.name)
        ),
    )


@router.delete("/apikey/me", summary="Revoke the API key of this request; its work stays")
async def revoke_api_key(deps: Deps, caller: CallerDep) -> dict[str, str]:
    owner = caller.owner
    if owner is None:
        raise NotSupportedError(f"{_NO_KEYS}, so there is none to revoke")
    await deps.store.write(lambda conn: api_keys.revoke(conn, str(owner), caller.name))
    await deps.keys.refresh()
    return {}


@router.post("/apikey", summary="Refused: keys are created on the server's command line")
async def mint_api_key() -> dict[str, str]:
    raise NotSupportedError(f"an API key cannot create API keys: {_HOW}")


@root.get("/api/unauthed/auth-config", summary="Refused: there is no browser login (SDK 0.26 - 0.28 asks)")
async def auth_config() -> dict[str, str]:
    raise NotSupportedError(f"this server has no browser login: {_HOW}")
