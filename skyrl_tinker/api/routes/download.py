"""Downloads by signed URLs, streamed from disk or from storage."""

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from skyrl_tinker.api.openapi.documents import answers
from skyrl_tinker.api.resources.checkpoint_archive import archive_of
from skyrl_tinker.api.resources.checkpoint_files import BINARY, CheckpointFiles, StoredFileResponse
from skyrl_tinker.api.resources.chrome_trace import chrome_trace
from skyrl_tinker.api.services import Deps, Services
from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.errors import found
from skyrl_tinker.store import checkpoint_records, session_records
from skyrl_tinker.store.checkpoint_records import CheckpointRow

root = APIRouter(prefix="/download", tags=["downloads"])


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
async def checkpoint_file(number: str, name: str, request: Request, deps: Deps) -> StoredFileResponse:
    deps.signer.require(request)
    return await CheckpointFiles(deps.storage, await _checkpoint(deps, int(number))).response(name)


@root.get(
    "/archive/{number}/{name}",
    summary="A LoRA adapter as tar, by its signed URL",
    response_class=Response,
    responses=answers("application/x-tar"),
)
async def archive(number: str, name: str, request: Request, deps: Deps) -> StreamingResponse:
    deps.signer.require(request)
    tar = await archive_of(deps.storage, await _checkpoint(deps, int(number)), deps.bases)
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
    session = SessionId(session_id)
    owner = await deps.store.read(lambda conn: session_records.owner_of(conn, session))
    events = chrome_trace(deps.store, session, owner)
    return StreamingResponse(events, headers=headers, media_type="application/json")


async def _checkpoint(deps: Services, number: int) -> CheckpointRow:
    """Return the checkpoint that the URL was signed for, never a later one of the same name."""
    row = await deps.store.read(lambda conn: checkpoint_records.by_id(conn, number))
    return found(row, "this checkpoint is deleted or expired")
