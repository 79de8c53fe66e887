"""Configuration flags that the SDK reads."""

from fastapi import APIRouter

from skyrl_tinker.api.openapi.documents import takes
from skyrl_tinker.api.services import Deps
from skyrl_tinker.protocol.schemas.session import (
    ClientConfigRequest,
    ClientConfigResponse,
    DynamicConfigResponse,
)

router = APIRouter(tags=["client"])


@router.post(
    "/client/config",
    summary="Flags that the SDK reads once, at construction",
    openapi_extra=takes(ClientConfigRequest),
)
async def client_config(deps: Deps) -> ClientConfigResponse:
    """Every SDK version, which the request names, gets the same answer."""
    flags, most = deps.settings.sdk, deps.settings.bodies.datums
    chunk = {"fwdbwd_max_chunk_len": min(flags.fwdbwd_max_chunk_len, most)}
    return ClientConfigResponse(**flags.model_dump() | chunk)


@router.post(
    "/client/dynamic_config",
    summary="Flags that the SDK reads again every few minutes",
    openapi_extra=takes(ClientConfigRequest),
)
async def dynamic_config() -> DynamicConfigResponse:
    return DynamicConfigResponse()
