"""The long poll that fetches results."""

import orjson
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from skyrl_tinker.api.bodies import off_loop, read_model
from skyrl_tinker.api.deps import Deps, Services, owner_of
from skyrl_tinker.api.hot import HotRoute
from skyrl_tinker.api.readiness import engine_state
from skyrl_tinker.errors import GoneError, NotFoundError, UserError
from skyrl_tinker.store.futures import Outcome
from skyrl_tinker.wire import codec
from skyrl_tinker.wire.codec import PROTOBUF
from skyrl_tinker.wire.ids import FutureStatus, RequestId, RequestKind
from skyrl_tinker.wire.models import FailedResponse, RetrieveFutureRequest, TryAgainResponse

router = APIRouter(tags=["futures"], route_class=HotRoute)


@router.post(
    "/retrieve_future",
    summary="Wait for a result: bytes as stored, a failure as 200 with `error`, 408 while it is not there",
    response_model=None,
    responses={200: {"model": FailedResponse}, 408: {"model": TryAgainResponse}},
)
async def retrieve_future(request: Request, deps: Deps) -> Response:
    wanted = await read_model(request, RetrieveFutureRequest)
    owner = owner_of(request)
    outcome = await deps.waiter.wait(RequestId(wanted.request_id), owner, deps.settings.long_poll_s)
    if outcome is None:
        raise _unknown(wanted.request_id, request.headers.get("x-tinker-request-type"))
    if outcome.status is FutureStatus.PENDING:
        return await _try_again(deps, outcome)
    return await _result(outcome, PROTOBUF in request.headers.get("accept", "").lower())


def _unknown(request_id: str, request_type: str | None) -> UserError:
    """410 makes the SDK send a sample again, which heals it after a lost database; 404 is final."""
    message = f"no future {request_id!r} on this server"
    return GoneError(message) if request_type == "Sample" else NotFoundError(message)


async def _try_again(deps: Services, outcome: Outcome) -> JSONResponse:
    engine = await engine_state(deps.store)
    answer = TryAgainResponse(
        request_id=outcome.request_id,
        queue_state="active" if engine.ready else "paused_capacity",
        queue_state_reason=None if engine.ready else f"the engine is {engine.state}: {engine.detail}",
    )
    return JSONResponse(answer.model_dump(exclude_none=True), 408)


async def _result(outcome: Outcome, takes_protobuf: bool) -> Response:
    if outcome.body is None or outcome.content_type is None:
        raise GoneError(f"the result of {outcome.request_id} has expired (setting result_ttl_s)")
    if outcome.content_type == PROTOBUF and not takes_protobuf:
        body = outcome.body
        converted = await off_loop(len(body), lambda: _as_json(outcome.kind, body))
        return Response(converted, media_type="application/json")
    return Response(outcome.body, media_type=outcome.content_type)


def _as_json(kind: RequestKind, body: bytes) -> bytes:
    """For SDKs up to 0.24 and curl, which ask for no protobuf."""
    convert = codec.sample_response_json if kind is RequestKind.SAMPLE else codec.forward_backward_output_json
    return orjson.dumps(convert(body))
