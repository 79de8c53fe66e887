"""Capabilities of this server: its base models."""

from fastapi import APIRouter

from skyrl_tinker.api.services import Deps
from skyrl_tinker.protocol.schemas.session import ServerCapabilitiesResponse, SupportedModel

router = APIRouter(tags=["client"])


@router.get("/get_server_capabilities", summary="Base models under every name they are served by")
async def get_server_capabilities(deps: Deps) -> ServerCapabilitiesResponse:
    longest = deps.facts.context_length
    return ServerCapabilitiesResponse(
        supported_models=[
            SupportedModel(model_name=name, max_context_length=longest) for name in deps.facts.names
        ]
    )
