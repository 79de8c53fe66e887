"""Calls that the SDK makes by itself: configuration flags, capabilities, telemetry, which is ignored.

A slow or failing answer to telemetry delays the client's fatal exceptions by up to 30 s. So does a refusal by
`keys.requests_per_s`, for which it counts: nothing that a key may send is without bound.
"""

from fastapi import APIRouter

from skyrl_tinker.api.openapi.documents import takes, takes_telemetry
from skyrl_tinker.api.services import Deps
from skyrl_tinker.protocol.schemas.session import (
    ClientConfigRequest,
    ClientConfigResponse,
    DynamicConfigResponse,
    ServerCapabilitiesResponse,
    SupportedModel,
    TelemetryResponse,
)

router = APIRouter(tags=["client"])


@router.post("/client/config", **takes("Flags that the SDK reads once, at construction", ClientConfigRequest))
async def client_config(deps: Deps) -> ClientConfigResponse:
    """Every SDK version, which the request names, gets the same answer."""
    return ClientConfigResponse(**deps.settings.sdk.model_dump())


@router.post(
    "/client/dynamic_config", **takes("Flags that the SDK reads again every few minutes", ClientConfigRequest)
)
async def dynamic_config() -> DynamicConfigResponse:
    return DynamicConfigResponse()


@router.post("/telemetry", **takes_telemetry("Accept telemetry unread: it may hold the client's API key"))
async def telemetry() -> TelemetryResponse:
    return TelemetryResponse()


@router.get(
    "/get_server_capabilities",
    summary="The base models, their context lengths, and their samplers' abilities",
)
async def get_server_capabilities(deps: Deps) -> ServerCapabilitiesResponse:
    return ServerCapabilitiesResponse(
        supported_models=[
            SupportedModel(
                model_name=facts.name,
                max_context_length=facts.context_length,
                trainable=facts.trainable,
                sampleable=facts.sampleable,
                sampler=facts.sampler,
            )
            for facts in deps.bases.all
        ]
    )
