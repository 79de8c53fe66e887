"""Parts of the OpenAPI document that FastAPI does not derive: introduction, bodies, results, the API key."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from skyrl_tinker.api.openapi.examples import EXAMPLES, TELEMETRY
from skyrl_tinker.protocol.schemas.base import Message
from skyrl_tinker.protocol.schemas.futures import FailedResponse
from skyrl_tinker.protocol.schemas.losses import CreateCustomLossResult
from skyrl_tinker.protocol.schemas.session import ErrorResponse
from skyrl_tinker.protocol.schemas.training import (
    CreateModelResult,
    LoadWeightsResult,
    OptimStepResult,
    SaveExternalResult,
    SaveSamplerResult,
    SaveWeightsResult,
    UnloadModelResult,
)

Json = dict[str, Any]

ERRORS: dict[int | str, Json] = {
    "4XX": {"model": ErrorResponse, "description": "The request is invalid; `detail` says what was expected"}
}
OPENAI_ERRORS: dict[int | str, Json] = {
    "4XX": {
        "description": "The request is invalid",
        "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
    }
}
_BINARY: Json = {"type": "string", "format": "binary"}
_RESULTS = (
    CreateModelResult,
    LoadWeightsResult,
    OptimStepResult,
    SaveWeightsResult,
    SaveSamplerResult,
    SaveExternalResult,
    CreateCustomLossResult,
    UnloadModelResult,
    FailedResponse,
)


DESCRIPTION = """\
The Tinker API on your own hardware. The usual client is the `tinker` SDK, with `TINKER_BASE_URL` set to
this server; every call can be made by hand, too.

**Keys.** A server on the loopback interface may run without API keys and then needs none. A server with
keys (`skyrl-tinker keys create`) expects one in the header `X-API-Key`, or as `Authorization: Bearer …`:
press *Authorize*. You see the objects of your own key only; others are answered with 404.

**Futures.** A call that takes long is answered at once with a `request_id`. POST it to
`retrieve_future`, which waits up to 20 s and answers with the result, with 408 (still pending: ask again;
`queue_state_reason` says why), or with 200 and `{"error", "category"}` if the request
failed. A result can be fetched several times.

**Order.** The requests of one model carry `seq_id` 1, 2, 3, …; they may arrive in any order and run in
order of `seq_id`. A repeated request gets the future of the first one. An invalid request becomes a
failed future: its `seq_id` is used.

**Start** with `create_session`, then `create_model` (and `retrieve_future`), `forward_backward`,
`optim_step`, `save_weights_for_sampler`, `asample`. Keep the session alive with `session_heartbeat`.
"""
TAGS = (
    {"name": "client", "description": "Calls that the SDK makes when it starts"},
    {"name": "auth", "description": "API keys and the JWTs that they are exchanged for"},
    {"name": "sessions", "description": "Sessions, to which everything that a client creates belongs"},
    {"name": "models", "description": "Models: creation, loading, description, release"},
    {"name": "training", "description": "Passes and optimizer steps"},
    {"name": "losses", "description": "Custom losses"},
    {"name": "weights", "description": "Saving weights"},
    {"name": "sampling", "description": "Sampling sessions and samples"},
    {"name": "futures", "description": "Futures: results and cancellation"},
    {"name": "runs", "description": "Training runs: the models that you created"},
    {"name": "checkpoints", "description": "Checkpoints: lists, publication, copies, deletion"},
    {"name": "downloads", "description": "Files by signed URLs, which need no API key"},
    {"name": "audit", "description": "Audit log"},
    {"name": "billing", "description": "Usage, without prices"},
    {"name": "console", "description": "Facts for the dashboard and `skyrl-tinker status`"},
    {"name": "openai", "description": "API for OpenAI's clients; base URL `/oai/api/v1`"},
    {"name": "health", "description": "Health and metrics, for the server's operator"},
)


class Documented(FastAPI):
    """FastAPI whose document describes the API key."""

    def openapi(self) -> Json:
        if self.openapi_schema is None:
            document = get_openapi(
                title=self.title,
                version=self.version,
                description=DESCRIPTION,
                tags=[dict(tag) for tag in TAGS],
                routes=self.routes,
            )
            key = {"type": "apiKey", "in": "header", "name": "X-API-Key"}
            document["components"]["securitySchemes"] = {"key": key}
            document["security"] = [{}, {"key": []}]
            self.openapi_schema = document
        return self.openapi_schema


def takes(summary: str, *models: type[Message]) -> Json:
    """Return the keywords of a route whose JSON body is one of `models`."""
    examples = {model.__name__: EXAMPLES[model] for model in models}
    return {"summary": summary, "openapi_extra": _body(schema_of(*models), examples)}


def takes_telemetry(summary: str) -> Json:
    """Return the keywords of the telemetry route, which accepts any object."""
    return {"summary": summary, "openapi_extra": _body({"type": "object"}, {"events": TELEMETRY})}


def takes_pass(summary: str, model: type[Message]) -> Json:
    """Return the keywords of a route whose body is `model` or protobuf."""
    keywords = takes(summary, model)
    keywords["openapi_extra"]["requestBody"]["content"]["application/x-protobuf"] = {"schema": _BINARY}
    return keywords


def answers(media_type: str, schema: Json | None = None, **others: Json) -> dict[int | str, Json]:
    """Return `responses` for a route that answers with bytes (no schema), text or JSON of its own."""
    content = {media_type: {"schema": schema or _BINARY}}
    return {200: {"description": "OK", "content": content | others}}


def answers_with_result() -> dict[int | str, Json]:
    return answers(
        "application/json", schema_of(*_RESULTS), **{"application/x-protobuf": {"schema": _BINARY}}
    )


def schema_of(*models: type[Message]) -> Json:
    """Return one schema without references: in a larger document they would not resolve."""
    schemas = [_inlined(TypeAdapter(model).json_schema()) for model in models]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _body(schema: Json, examples: Mapping[str, Json]) -> Json:
    by_name = {name: {"value": example} for name, example in examples.items()}
    content = {"application/json": {"schema": schema, "examples": by_name}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Json) -> Json:
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in node.items()}

    resolved: Json = resolve(schema)
    return resolved
