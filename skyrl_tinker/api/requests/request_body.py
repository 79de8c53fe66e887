"""Request bodies, read and checked; large ones are parsed off the event loop."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Request

from skyrl_tinker.api.requests.json_bounds import parse_json
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.base import Message, parse
from skyrl_tinker.protocol.validation.key_limits import KeyLimits
from skyrl_tinker.system.off_loop import off_loop

M = TypeVar("M", bound=Message)
T = TypeVar("T")
_DESCRIPTIVE = ("user_metadata", "tags", "project_id", "display_name", "sdk_version")


async def read_as(request: Request, make: Callable[[Mapping[str, Any]], T]) -> T:
    """Return the value that `make` builds of the body. UserError if that is no JSON object."""
    body = await request.body()
    return await off_loop(len(body), lambda: make(json_object(body)))


async def read_model(request: Request, model: type[M], limits: KeyLimits | None = None) -> M:
    """Return the body as `model`. UserError that names the invalid field; `limits`: of its metadata."""

    def make(payload: Mapping[str, Any]) -> M:
        if limits is not None:
            require_metadata(limits, payload)
        return parse(model, payload)

    return await read_as(request, make)


def require_metadata(limits: KeyLimits, payload: Mapping[str, Any]) -> None:
    """Check the size of the texts that describe a session, model or checkpoint, before validation.

    Raises KeyLimitError.
    """
    given = (payload[name] for name in _DESCRIPTIVE if payload.get(name) is not None)
    limits.require_metadata(sum(len(orjson.dumps(value)) for value in given))


def json_object(body: bytes) -> Mapping[str, Any]:
    value = parse_json(body)
    if not isinstance(value, dict):
        raise UserError(f"request body: found {type(value).__name__}, expected a JSON object")
    return value
