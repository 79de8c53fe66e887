"""Tokenizers of base models, for clients on other machines."""

import asyncio
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from skyrl_tinker.api.openapi.documents import answers
from skyrl_tinker.api.resources.tokenizer_files import tokenizer_tar
from skyrl_tinker.api.services import Deps

TAR = "application/x-tar"
router = APIRouter(tags=["models"])


@router.get(
    "/tokenizer",
    summary="A base model's tokenizer as a tar, to be loaded from a directory",
    response_class=Response,
    responses=answers(TAR),
)
async def tokenizer(deps: Deps, base_model: str | None = None) -> Response:
    """Unpack it: `curl -fH "X-API-Key: $TINKER_API_KEY" $TINKER_BASE_URL/api/v1/tokenizer | tar -x`."""
    facts = deps.bases.first if base_model is None else deps.bases.require(base_model)
    tar = await asyncio.to_thread(tokenizer_tar, Path(facts.directory))
    return Response(
        tar, media_type=TAR, headers={"Content-Disposition": 'attachment; filename="tokenizer.tar"'}
    )
