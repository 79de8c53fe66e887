"""Parts of the OpenAPI document that FastAPI does not derive: request bodies, result schemas, the API key."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from skyrl_tinker.api.openapi.description import DESCRIPTION, TAGS
from skyrl_tinker.api.openapi.examples import EXAMPLES, FORWARD_PASS, PASS, TELEMETRY
from skyrl_tinker.protocol.schemas.base import MAX_INT32, Message
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


def takes(*models: type[Message]) -> Json:
    """Return openapi_extra for a route whose JSON body is one of `models`."""
    schema = schema_of(*models)
    return _body(schema, {model.__name__: EXAMPLES[model] for model in models})


def takes_telemetry() -> Json:
    """Return openapi_extra for the telemetry route, which accepts any object."""
    return _body({"type": "object"}, {"events": TELEMETRY})


def takes_pass(*, forward: bool) -> Json:
    """Return openapi_extra for forward_backward and forward, whose bodies have no pydantic model."""
    example = FORWARD_PASS if forward else PASS
    extra = _body(_pass_schema("forward_input" if forward else "forward_backward_input"), {"pass": example})
    extra["requestBody"]["content"]["application/x-protobuf"] = {"schema": _BINARY}
    return extra


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


def _pass_schema(key: str) -> Json:
    numbers = {"type": "array", "items": {"type": "integer"}}
    tensor = _object(
        {
            "data": {"type": "array", "items": {"type": "number"}},
            "dtype": {"enum": ["float32", "int64"]},
            "shape": numbers,
            "sparse_crow_indices": numbers,
            "sparse_col_indices": numbers,
        },
        "data",
        "dtype",
    )
    chunk = _object({"type": {"const": "encoded_text"}, "tokens": numbers}, "tokens")
    datum = _object(
        {
            "model_input": _object({"chunks": {"type": "array", "items": chunk}}, "chunks"),
            "loss_fn_inputs": {"type": "object", "additionalProperties": tensor},
        },
        "model_input",
        "loss_fn_inputs",
    )
    config = {"type": "object", "additionalProperties": {"type": ["number", "string"]}}
    data = {"type": "array", "items": datum}
    body = _object({"loss_fn": {"type": "string"}, "loss_fn_config": config, "data": data}, "loss_fn", "data")
    seq_id = {"type": "integer", "minimum": 1, "maximum": MAX_INT32}
    return _object({"model_id": {"type": "string"}, "seq_id": seq_id, key: body}, "model_id", "seq_id", key)


def _object(properties: Json, *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


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
