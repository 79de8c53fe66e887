"""Downloads by signed URLs, streamed from disk."""

import asyncio
import os
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response, StreamingResponse

from skyrl_tinker.api.openapi.documents import answers
from skyrl_tinker.api.resources.checkpoint_archive import archive_of
from skyrl_tinker.api.resources.chrome_trace import chrome_trace
from skyrl_tinker.api.services import Deps, Services
from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.domain.manifest import read_manifest
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.off_loop import in_disk_thread
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.checkpoint_records import CheckpointRow

BINARY = "application/octet-stream"
root = APIRouter(prefix="/download", tags=["downloads"])


class LargeFile(FileResponse):
    """Response with ranges and HEAD by Starlette. A deletion meanwhile does not interrupt it."""

    chunk_size = 1 << 20  # each chunk is read in another thread


@root.get(
    "/checkpoint/{number}/{name}",
    summary="A file of an export, by its signed URL",
    response_class=Response,
    responses=answers(BINARY),
)
@root.head(
    "/checkpoint/{number}/{name}",
    summary="The file's size, by the same URL",
    response_class=Response,
    responses=answers(BINARY),
)
async def checkpoint_file(number: str, name: str, request: Request, deps: Deps) -> FileResponse:
    deps.signer.require(request)
    row = await _checkpoint(deps, int(number))
    try:
        status = await asyncio.to_thread(_stat, row, name)
    except FileNotFoundError:
        raise NotFoundError(f"no checkpoint {row.path}: its files are gone") from None
    return LargeFile(Path(row.directory) / name, media_type=BINARY, filename=name, stat_result=status)


@root.get(
    "/archive/{number}/{name}",
    summary="A LoRA adapter as tar, by its signed URL",
    response_class=Response,
    responses=answers("application/x-tar"),
)
async def archive(number: str, name: str, request: Request, deps: Deps) -> StreamingResponse:
    deps.signer.require(request)
    tar = await archive_of(await _checkpoint(deps, int(number)))
    headers = {"Content-Length": str(tar.size), "Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(tar.stream(), headers=headers, media_type="application/x-tar")


@root.get(
    "/trace/{session_id}",
    summary="A session's requests, by a signed URL",
    response_class=Response,
    responses=answers("application/json", {"type": "array"}),
)
async def trace(session_id: str, request: Request, deps: Deps) -> StreamingResponse:
    """JSON of the Chrome trace format: open it in https://ui.perfetto.dev."""
    deps.signer.require(request)
    headers = {"Content-Disposition": f'attachment; filename="{session_id}.json"'}
    events = chrome_trace(deps.store, SessionId(session_id))
    return StreamingResponse(events, headers=headers, media_type="application/json")


async def _checkpoint(deps: Services, number: int) -> CheckpointRow:
    """Return the checkpoint that the URL was signed for, never a later one of the same name.

    Its files are on this host then, if they are anywhere.
    """
    with deps.store.read() as conn:
        row = checkpoint_records.by_id(conn, number)
    if row is None:
        raise NotFoundError("this checkpoint is deleted or expired")
    await in_disk_thread(deps.storage.fetch, Path(row.directory))
    return row


def _stat(row: CheckpointRow, name: str) -> os.stat_result:
    """Stat a file of the checkpoint. Raises FileNotFoundError; NotFoundError for an unknown name."""
    if name not in read_manifest(row.directory).files:
        raise NotFoundError(f"{row.path} has no file {name!r}")
    return (Path(row.directory) / name).stat()
