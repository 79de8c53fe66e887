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
    return ClientConfigResponse(
        custom_loss_server_side=deps.settings.custom_loss_server_side,
        sample_use_retrieve_futures=deps.settings.sample_use_retrieve_futures,
    )


@router.post(
    "/client/dynamic_config",
    summary="Flags that the SDK reads again every few minutes",
    openapi_extra=takes(ClientConfigRequest),
)
async def dynamic_config() -> DynamicConfigResponse:
    return DynamicConfigResponse()
