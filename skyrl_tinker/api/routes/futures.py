"""Long polls, for one result and for all samples of a client, and cancellation of samples."""

import time
from functools import partial

import orjson
from fastapi import APIRouter, Request
from sqlalchemy import Connection
from starlette.responses import JSONResponse, Response

from skyrl_tinker.api.middleware.fast_routes import FastRoute
from skyrl_tinker.api.openapi.documents import answers_with_result, takes
from skyrl_tinker.api.requests.request_body import read_model
from skyrl_tinker.api.services import Deps, Owner, Reached, Services, reach_of
from skyrl_tinker.api.waiting.engine_client import engine_state
from skyrl_tinker.api.waiting.queue_reasons import Reason, engine_reason, queue_reason
from skyrl_tinker.domain.ids import FutureStatus, RequestId, RequestKind, SamplingSessionId
from skyrl_tinker.errors import GoneError, NotFoundError, UserError
from skyrl_tinker.protocol.protobuf import pass_results, sample_results
from skyrl_tinker.protocol.protobuf.pass_results import PROTOBUF
from skyrl_tinker.protocol.schemas.futures import (
    CancelFutureRequest,
    CompletedFuture,
    RetrieveFutureRequest,
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
    TryAgainResponse,
)
from skyrl_tinker.store import audit_log, sampling_sessions
from skyrl_tinker.store.futures import cancellation, completions
from skyrl_tinker.store.futures.completions import Completion
from skyrl_tinker.store.futures.outcomes import Outcome
from skyrl_tinker.system.off_loop import off_loop

router = APIRouter(tags=["futures"])
fast = APIRouter(tags=["futures"], route_class=FastRoute)


@fast.post(
    "/retrieve_future",
    response_model=None,
    responses={**answers_with_result(), 408: {"model": TryAgainResponse}},
    **takes(
        "Wait for a result: as stored; 200 with `error` for a failure; 408 while pending",
        RetrieveFutureRequest,
    ),
)
async def retrieve_future(request: Request, deps: Deps) -> Response:
    message = await read_model(request, RetrieveFutureRequest)
    reach = reach_of(request)
    outcome = await deps.waiter.wait(RequestId(message.request_id), reach, deps.settings.timeouts.long_poll_s)
    if outcome is None:
        raise _unknown(message.request_id, request.headers.get("x-tinker-request-type"))
    if outcome.status is FutureStatus.PENDING:
        return await _try_again(deps, outcome)
    return await _result(outcome, PROTOBUF in request.headers.get("accept", "").lower())


def _unknown(request_id: str, request_type: str | None) -> UserError:
    """Return 410 for a sample, so that the SDK sends it again (after a lost database), else a final 404."""
    message = f"no future {request_id!r} on this server"
    return GoneError(message) if request_type == "Sample" else NotFoundError(message)


async def _try_again(deps: Services, outcome: Outcome) -> JSONResponse:
    reason = await _reason(deps, outcome.request_id)
    answer = TryAgainResponse(
        request_id=outcome.request_id, queue_state=reason.state, queue_state_reason=reason.text
    )
    return JSONResponse(answer.model_dump(exclude_none=True), 408)


async def _reason(deps: Services, request_id: RequestId) -> Reason:
    if deps.waiter.stopped:  # no time to ask the engine
        return Reason("paused_capacity", "this server process is shutting down")
    if (stopped := engine_reason(await deps.store.read(engine_state))) is not None:
        return stopped
    queues = await deps.queues.view()
    position = await deps.store.read(lambda conn: cancellation.queue_position(conn, request_id))
    if position is None or queues is None:
        return Reason("active", None)
    return queue_reason(position, queues)


async def _result(outcome: Outcome, accepts_protobuf: bool) -> Response:
    if outcome.body is None or outcome.content_type is None:
        raise GoneError(f"the result of {outcome.request_id} has expired (setting retention.results_s)")
    if outcome.content_type == PROTOBUF and not accepts_protobuf:
        body = outcome.body
        converted = await off_loop(len(body), lambda: _as_json(outcome.kind, body))
        return Response(converted, media_type="application/json")
    return Response(outcome.body, media_type=outcome.content_type)


def _as_json(kind: RequestKind, body: bytes) -> bytes:
    """Convert a protobuf result for SDKs up to 0.24 and curl, which do not accept protobuf."""
    convert = (
        sample_results.sample_response_json
        if kind is RequestKind.SAMPLE
        else pass_results.forward_backward_output_json
    )
    return orjson.dumps(convert(body))


@router.post(
    "/retrieve_futures",
    **takes(
        "Wait for any sample of a sampling client; results are then fetched by retrieve_future",
        RetrieveFuturesRequest,
    ),
)
async def retrieve_futures(request: Request, deps: Deps, reach: Reached) -> RetrieveFuturesResponse:
    """Return samples that finished after `prev_cursor`, in order of finishing; none on timeout."""
    message = await read_model(request, RetrieveFuturesRequest)
    session_id = SamplingSessionId(message.target.sampling_session_id)
    await deps.store.read(lambda conn: sampling_sessions.require(conn, reach, session_id))
    longest = deps.settings.timeouts.long_poll_s
    timeout_s = longest if message.timeout is None else min(message.timeout, longest)
    clone = message.target.cloned_sampler_id
    finished = await _finished(deps, session_id, clone, message.prev_cursor, timeout_s)
    # Without completions the cursor stays: one that moves has the SDK acknowledge it at once.
    cursor = finished[-1].cursor if finished else message.prev_cursor
    return RetrieveFuturesResponse(completions=[_completed(row) for row in finished], cursor=cursor)


async def _finished(
    deps: Services, session_id: SamplingSessionId, clone: int, after: int, timeout_s: float
) -> list[Completion]:
    deadline = time.monotonic() + timeout_s
    with deps.waiter.news_of(session_id) as news:
        while True:
            news.clear()
            query = partial(
                completions.finished_since, sampling_session_id=session_id, clone=clone, after=after
            )
            finished, after = await deps.store.fetch(query)
            if finished or not await deps.waiter.wait_for_news(news, max(0.0, deadline - time.monotonic())):
                return finished


def _completed(completion: Completion) -> CompletedFuture:
    if completion.status is FutureStatus.FAILED:
        return CompletedFuture(state="failed", request_id=completion.request_id)
    return CompletedFuture(
        state="finished", request_id=completion.request_id, response_payload_uncompressed_size=completion.size
    )


@router.post(
    "/cancel_future", **takes("Cancel a sample, unless it has finished already", CancelFutureRequest)
)
async def cancel_future(request: Request, deps: Deps, reach: Reached, owner: Owner) -> dict[str, str]:
    """Answer 400 for anything but a sample: later requests of a model build on its earlier ones."""
    message = await read_model(request, CancelFutureRequest)
    request_id = RequestId(message.request_id)

    def cancel(conn: Connection) -> None:
        cancellation.cancel_sample(conn, reach, request_id)
        audit_log.record_admin(conn, reach, owner, "cancel", request_id=request_id)

    await deps.store.write(cancel, deps.wake_engine)
    return {}


router.include_router(fast)
