"""Export of a session's timeline."""

from fastapi import APIRouter, Request

from skyrl_tinker.api.security.signing import expiry
from skyrl_tinker.api.services import Deps, Reached
from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.protocol.schemas.session_list import TraceExportResponse
from skyrl_tinker.store.owners import require_session

router = APIRouter(tags=["downloads"])


@router.get("/sessions/{session_id}/trace_export", summary="Signed URL of a session's trace")
async def trace_export(session_id: str, request: Request, deps: Deps, reach: Reached) -> TraceExportResponse:
    """Answer at once: the trace is built while it is downloaded."""
    await deps.store.read(lambda conn: require_session(conn, reach, SessionId(session_id)))
    url = deps.signer.url(request, f"/download/trace/{session_id}", expiry())
    return TraceExportResponse(url=url)
