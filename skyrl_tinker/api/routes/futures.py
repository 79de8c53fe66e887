"""The long polls, for one result and for all samples of a client; and how a sample is given up."""

import time
from functools import partial

import orjson
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from skyrl_tinker.api.middleware.fast_routes import FastRoute
from skyrl_tinker.api.openapi.documents import answers_with_result, takes
from skyrl_tinker.api.requests.request_body import read_model
from skyrl_tinker.api.services import Deps, Owner, Services, owner_of
from skyrl_tinker.api.waiting.queue_reasons import Reason, reason
from skyrl_tinker.api.waiting.readiness import engine_state
from skyrl_tinker.domain.ids import FutureStatus, RequestId, RequestKind, SamplingSessionId
from skyrl_tinker.errors import GoneError, NotFoundError, UserError
from skyrl_tinker.off_loop import off_loop
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.protocol.protobuf.pass_requests import PROTOBUF
from skyrl_tinker.protocol.schemas import (
    CancelFutureRequest,
    CompletedFuture,
    RetrieveFutureRequest,
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
    TryAgainResponse,
)
from skyrl_tinker.store.futures import cancellation, completions
from skyrl_tinker.store.futures.completions import Completion
from skyrl_tinker.store.futures.outcomes import Outcome

router = APIRouter(tags=["futures"])
hot = APIRouter(tags=["futures"], route_class=FastRoute)


@hot.post(
    "/retrieve_future",
    summary="Wait for a result: bytes as stored, a failure as 200 with `error`, 408 while it is not there",
    response_model=None,
    responses={**answers_with_result(), 408: {"model": TryAgainResponse}},
    openapi_extra=takes(RetrieveFutureRequest),
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
    why = await _reason(deps, outcome.request_id)
    answer = TryAgainResponse(
        request_id=outcome.request_id, queue_state=why.state, queue_state_reason=why.text
    )
    return JSONResponse(answer.model_dump(exclude_none=True), 408)


async def _reason(deps: Services, request_id: RequestId) -> Reason:
    if deps.waiter.stopped:  # there is no time to ask anybody
        return Reason("paused_capacity", "this server process is ending")
    engine = await engine_state(deps.store)
    if not engine.ready:
        return Reason("paused_capacity", f"the engine is {engine.state}: {engine.detail}")
    queues = await deps.queues.seen()
    with deps.store.read() as conn:
        place = cancellation.queue_position(conn, request_id)
    if place is None or queues is None:
        return Reason("active", None)
    return reason(place, queues)


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
    convert = (
        pass_requests.sample_response_json
        if kind is RequestKind.SAMPLE
        else pass_requests.forward_backward_output_json
    )
    return orjson.dumps(convert(body))


@router.post(
    "/retrieve_futures",
    summary="Wait for any sample of a sampling client; its result is fetched after",
    openapi_extra=takes(RetrieveFuturesRequest),
)
async def retrieve_futures(request: Request, deps: Deps, owner: Owner) -> RetrieveFuturesResponse:
    """Those that finished after `prev_cursor`, in that order; none when the time is over."""
    wanted = await read_model(request, RetrieveFuturesRequest)
    session_id = SamplingSessionId(wanted.target.sampling_session_id)
    with deps.store.read() as conn:
        completions.require_sampler(conn, owner, session_id)
    longest = deps.settings.long_poll_s
    hold = longest if wanted.timeout is None else min(wanted.timeout, longest)
    found = await _finished(deps, session_id, wanted.target.cloned_sampler_id, wanted.prev_cursor, hold)
    # Nothing of this client's lies between: a cursor that moves on has the SDK acknowledge it at once.
    cursor = found[-1].cursor if found else wanted.prev_cursor
    return RetrieveFuturesResponse(completions=[_completed(each) for each in found], cursor=cursor)


async def _finished(
    deps: Services, session_id: SamplingSessionId, clone: int, after: int, hold_s: float
) -> list[Completion]:
    until = time.monotonic() + hold_s
    while True:
        news = deps.waiter.news
        look = partial(completions.finished_since, sampling_session_id=session_id, clone=clone, after=after)
        found, after = await deps.store.fetch(look)
        if found or not await deps.waiter.announced(news, max(0.0, until - time.monotonic())):
            return found


def _completed(one: Completion) -> CompletedFuture:
    if one.status is FutureStatus.FAILED:
        return CompletedFuture(state="failed", request_id=one.request_id)
    return CompletedFuture(
        state="finished", request_id=one.request_id, response_payload_uncompressed_size=one.size
    )


@router.post(
    "/cancel_future",
    summary="Stop a sample: it fails as cancelled, unless it is done already",
    openapi_extra=takes(CancelFutureRequest),
)
async def cancel_future(request: Request, deps: Deps, owner: Owner) -> dict[str, str]:
    """400 for what is no sample: requests that came later build on those of a model."""
    wanted = await read_model(request, CancelFutureRequest)
    request_id = RequestId(wanted.request_id)
    await deps.store.write(lambda conn: cancellation.cancel_sample(conn, owner, request_id), deps.wake_engine)
    return {}


router.include_router(hot)
