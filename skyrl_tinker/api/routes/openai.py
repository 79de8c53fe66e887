"""OpenAI-compatible routes: requests are validated here and answered by the engine."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response
from sqlalchemy import Connection
from starlette.requests import ClientDisconnect

from skyrl_tinker.api.openapi.documents import OPENAI_ERRORS, answers, takes
from skyrl_tinker.api.requests.request_body import read_as
from skyrl_tinker.api.services import Deps, Owner, Services, caller_of
from skyrl_tinker.api.waiting.engine_client import RETRY_AFTER_S, EngineUnavailableError
from skyrl_tinker.errors import UnavailableError
from skyrl_tinker.protocol.schemas.chats import ChatCompletionRequest
from skyrl_tinker.protocol.schemas.openai import (
    CompletionRequest,
    ListedModel,
    ModelList,
    OpenAIRequest,
    parse_openai,
)
from skyrl_tinker.protocol.validation.openai import check_openai
from skyrl_tinker.protocol.validation.sampling import stop_bytes
from skyrl_tinker.store.reports import openai_models

CLIENT_GONE = 499  # nginx's status for a closed connection

root = APIRouter(tags=["openai"], prefix="/oai/api/v1", responses=OPENAI_ERRORS)

_ANSWER = answers(
    "application/json", {"type": "object"}, **{"text/event-stream": {"schema": {"type": "string"}}}
)


@root.get("/models", summary="Base models; any tinker://…/sampler_weights/… path is a model, too")
async def models(deps: Deps) -> ModelList:
    return ModelList(data=[ListedModel(id=facts.name) for facts in deps.bases.all if facts.sampleable])


@root.get("/models/{model:path}", summary="A base model, or weights for sampling")
async def retrieve_model(model: str, deps: Deps, owner: Owner) -> ListedModel:
    def find(conn: Connection) -> int:
        if deps.bases.find(model) is not None:
            deps.bases.require_sampled(model)
            return 0
        row, _ = openai_models.find_weights(conn, owner, model, deps.bases)
        deps.bases.require_sampled(row.base_model)
        return int(row.created_at)

    return ListedModel(id=model, created=await deps.store.fetch(find))


@root.post(
    "/completions",
    response_class=Response,
    responses=_ANSWER,
    **takes("OpenAI's completions, streamed or not", CompletionRequest),
)
async def completions(request: Request, deps: Deps) -> Response:
    return await _relay(request, deps, CompletionRequest)


@root.post(
    "/chat/completions",
    response_class=Response,
    responses=_ANSWER,
    **takes(
        "OpenAI's chat completions, streamed or not, by the model's own chat template", ChatCompletionRequest
    ),
)
async def chat_completions(request: Request, deps: Deps) -> Response:
    return await _relay(request, deps, ChatCompletionRequest)


async def _relay(request: Request, deps: Services, model: type[OpenAIRequest]) -> Response:
    parsed = await read_as(request, lambda payload: parse_openai(model, payload))
    caller = caller_of(request)
    caller.limits.require_stop(stop_bytes(parsed.stop))
    limits = await deps.limits.of_openai_model(parsed.model, caller.owner)
    check_openai(parsed, limits.sampler)
    base_model = limits.base_model
    if refusal := deps.queues.full(base_model):
        raise refusal
    try:
        async with deps.backlogs.held(caller):
            deps.queues.accepted(base_model)
            return await deps.engine.relay(request)
    except EngineUnavailableError as error:
        raise await deps.engine.refusal() from error
    except asyncio.CancelledError:
        if not deps.waiter.stopped:
            raise
        raise UnavailableError("this server process is shutting down; try again", RETRY_AFTER_S) from None
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
