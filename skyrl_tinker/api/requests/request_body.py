"""Request bodies, read and checked; large ones are parsed off the event loop."""

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Request

from skyrl_tinker.api.requests.json_bounds import parse_json
from skyrl_tinker.errors import UserError
from skyrl_tinker.off_loop import off_loop
from skyrl_tinker.protocol.schemas.base import Message, parse

M = TypeVar("M", bound=Message)


async def read_json(request: Request) -> Mapping[str, Any]:
    """Return the body as a JSON object. UserError if it is none."""
    body = await request.body()
    return await off_loop(len(body), lambda: json_object(body))


async def read_model(request: Request, model: type[M]) -> M:
    """Return the body as `model`. UserError that names the invalid field."""
    body = await request.body()
    return await off_loop(len(body), lambda: parse(model, json_object(body)))


def json_size(*values: Any) -> int:
    """Return the bytes of these values as JSON."""
    return sum(len(orjson.dumps(value)) for value in values)


def json_object(body: bytes) -> Mapping[str, Any]:
    value = parse_json(body)
    if not isinstance(value, dict):
        raise UserError(f"request body: found {type(value).__name__}, expected a JSON object")
    return value
