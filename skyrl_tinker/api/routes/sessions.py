"""Sessions: creation, heartbeats, finish."""

from fastapi import APIRouter, Request
from sqlalchemy import Connection

from skyrl_tinker.api.middleware.fast_routes import FastRoute
from skyrl_tinker.api.openapi.documents import takes
from skyrl_tinker.api.requests.request_body import read_model
from skyrl_tinker.api.services import CallerDep, Deps, Owner, Reached, owner_of
from skyrl_tinker.api.waiting.engine_client import EngineState, engine_state
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.protocol.schemas.session import (
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    HeartbeatRequest,
    HeartbeatResponse,
)
from skyrl_tinker.redaction import without_paths
from skyrl_tinker.store import audit_log, owners, server_state, session_records
from skyrl_tinker.store.reports import holdings

router = APIRouter(tags=["sessions"])
fast = APIRouter(tags=["sessions"], route_class=FastRoute)
_LOOPBACK = ("127.0.0.1", "::1")


@router.post("/create_session", **takes("Open a session", CreateSessionRequest))
async def create_session(
    request: Request, deps: Deps, owner: Owner, caller: CallerDep
) -> CreateSessionResponse:
    message = await read_model(request, CreateSessionRequest, caller.limits)
    warnings = [_unready(await deps.store.read(engine_state)), _tokenizers_elsewhere(deps.bases, request)]

    def create(conn: Connection) -> CreateSessionResponse:
        if caller.limits.sessions is not None:
            caller.limits.require_sessions(holdings.open_sessions(conn, owner))
        session_id = session_records.create(conn, owner=owner, **message.model_dump())
        warning = server_state.get(conn, server_state.WARNING)
        text = "\n".join(filter(None, [warning, *warnings]))
        return CreateSessionResponse(session_id=session_id, warning_message=text or None)

    return await deps.store.write(create)


def _unready(engine: EngineState) -> str | None:
    if engine.ready:
        return None
    return (
        f"the server is not ready: its engine is {engine.state} ({without_paths(engine.detail)}). "
        "Requests are accepted and wait for it"
    )


def _tokenizers_elsewhere(bases: Bases, request: Request) -> str | None:
    """Say where the tokenizers are that the client cannot read: the SDK's own error does not."""
    here, _ = request.scope["server"]
    local = [facts.name for facts in bases.all if facts.hub_name is None]
    if not local or request.client is None or request.client.host in (here, *_LOOPBACK):
        return None
    return (
        f"the tokenizer of {', '.join(local)} is not from the Hugging Face hub, so get_tokenizer() works on "
        "the server's machine only. Elsewhere, unpack the tar that GET /api/v1/tokenizer?base_model=… of "
        "this server sends, and load it with AutoTokenizer.from_pretrained(DIRECTORY)"
    )


@fast.post("/session_heartbeat", **takes("Keep a session alive; 410 once it is finished", HeartbeatRequest))
async def session_heartbeat(request: Request, deps: Deps) -> HeartbeatResponse:
    message = await read_model(request, HeartbeatRequest)
    await deps.heartbeats.keep(owner_of(request), SessionId(message.session_id))
    return HeartbeatResponse()


@router.post(
    "/sessions/{session_id}/finish", **takes("Finish a session; the first reason wins", FinishSessionRequest)
)
async def finish_session(
    session_id: str, request: Request, deps: Deps, reach: Reached, owner: Owner
) -> dict[str, str]:
    message = await read_model(request, FinishSessionRequest)

    def finish(conn: Connection) -> None:
        owners.require_session(conn, reach, SessionId(session_id))
        session_records.finish(conn, SessionId(session_id), message.reason.type, message.detail)
        audit_log.record_admin(conn, reach, owner, "finish", session_id=session_id)

    await deps.store.write(finish)
    deps.bell.ring("engine")  # its models can be released
    return {}


router.include_router(fast)
