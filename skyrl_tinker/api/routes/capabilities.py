"""Capabilities of this server: its base model and its sampling engine."""

from fastapi import APIRouter

from skyrl_tinker.api.services import Deps
from skyrl_tinker.protocol.schemas.session import ServerCapabilitiesResponse, SupportedModel

router = APIRouter(tags=["client"])


@router.get(
    "/get_server_capabilities", summary="The base model, its context length, and the samplers' abilities"
)
async def get_server_capabilities(deps: Deps) -> ServerCapabilitiesResponse:
    facts = deps.facts
    return ServerCapabilitiesResponse(
        supported_models=[SupportedModel(model_name=facts.name, max_context_length=facts.context_length)],
        sampler=facts.sampler,
    )
