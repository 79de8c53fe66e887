"""Telemetry, ignored. A slow or failing answer delays the client's fatal exceptions by up to 30 s.

So does a refusal by `keys.requests_per_s`, for which it counts: nothing that a key may send is without bound.
"""

from fastapi import APIRouter

from skyrl_tinker.api.openapi.documents import takes_telemetry
from skyrl_tinker.protocol.schemas.session import TelemetryResponse

router = APIRouter(tags=["client"])


@router.post(
    "/telemetry",
    summary="Accept telemetry unread: it may hold the client's API key",
    openapi_extra=takes_telemetry(),
)
async def telemetry() -> TelemetryResponse:
    return TelemetryResponse()
