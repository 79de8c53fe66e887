"""Tokenizers of base models, for clients on other machines."""

import asyncio
import io
import tarfile
from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from skyrl_tinker.api.openapi.documents import answers
from skyrl_tinker.api.services import Deps
from skyrl_tinker.errors import NotFoundError

TAR = "application/x-tar"
TOKENIZER_FILES = (
    "config.json",  # transformers finds the tokenizer's class by it
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
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


@cache
def tokenizer_tar(directory: Path) -> bytes:
    """Return a tar of those files that the model has, a few MB, which all answers share.

    Raises NotFoundError if it has no tokenizer.
    """
    files = [file for name in TOKENIZER_FILES if (file := directory / name).is_file()]
    if not any(file.name.startswith(("tokenizer", "vocab")) for file in files):
        raise NotFoundError("the base model has no tokenizer")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in files:
            tar.addfile(_member(file), io.BytesIO(file.read_bytes()))
    return buffer.getvalue()


def _member(file: Path) -> tarfile.TarInfo:
    """Return a header without the owner and the mode of the server's file."""
    member = tarfile.TarInfo(file.name)
    status = file.stat()
    member.size, member.mtime = status.st_size, int(status.st_mtime)
    return member
