"""Capabilities of this server: its base models and their sampling engines."""

from fastapi import APIRouter

from skyrl_tinker.api.services import Deps
from skyrl_tinker.protocol.schemas.session import ServerCapabilitiesResponse, SupportedModel

router = APIRouter(tags=["client"])


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
