"""Request bodies, read and checked; large ones are parsed off the event loop."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Request

from skyrl_tinker.errors import TooLargeError, UserError
from skyrl_tinker.protocol.schemas.base import Message, parse
from skyrl_tinker.protocol.validation.key_limits import KeyLimits
from skyrl_tinker.system.off_loop import off_loop

M = TypeVar("M", bound=Message)
T = TypeVar("T")
_DESCRIPTIVE = ("user_metadata", "tags", "project_id", "display_name", "sdk_version")


MAX_DEPTH = 64
MAX_ITEMS = 2_000_000
"""Commas: a parsed number takes about 40 bytes."""
MAX_SIGNS = 1_000_000
"""Brackets and quotes: an empty list of two bytes takes 64 once it is parsed."""
MAX_OBJECTS = 100_000
"""Validating one takes 10 microseconds, as a part of a prompt. A pass of 4096 datums has 30,000."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # possessive: no memory for each escape
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19
"""Digits of the shortest integer that may need more than 64 bits; a fraction may have as many."""


def parse_json(body: bytes) -> object:
    """Parse the body. UserError if it is not JSON, or beyond one of the bounds above."""
    if len(body) > MAX_SIGNS:  # a shorter one has fewer parts
        _check_parts(body)
    try:
        value: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UserError(f"request body: not valid JSON: {error}") from error
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:  # those in strings included
        _check_brackets(body)
    return value


def _check_parts(body: bytes) -> None:
    commas = body.count(b",")
    if commas > MAX_ITEMS:
        raise TooLargeError(f"request body: found {commas} commas, expected at most {MAX_ITEMS}")
    signs = sum(map(body.count, (b"[", b"{", b'"')))
    if signs > MAX_SIGNS:
        raise TooLargeError(
            f"request body: found {signs} opening brackets and quotes, expected at most {MAX_SIGNS}"
        )


def _check_brackets(body: bytes) -> None:
    """Check valid JSON: each iteration removes the innermost brackets, at the speed of C."""
    brackets = _STRING.sub(b"", body).translate(None, _NOT_BRACKETS)
    if (objects := brackets.count(b"{")) > MAX_OBJECTS:
        raise TooLargeError(f"request body: found {objects} objects, expected at most {MAX_OBJECTS}")
    brackets = brackets.translate(_ONE_KIND)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise UserError(f"request body: nested deeper than {MAX_DEPTH} levels")


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
    limits.require_metadata(sum(map(_size, given)))


def _size(value: object) -> int:
    try:
        return len(orjson.dumps(value))
    except orjson.JSONEncodeError:  # an integer of more than 64 bits, which validation refuses by name
        return 0


def json_object(body: bytes, *, exact: bool = True) -> Mapping[str, Any]:
    """Parse the body as `parse_json`. `exact`: integers of more than 64 bits, too, which else are floats.

    UserError if it is no object.
    """
    value = parse_json(body)
    if exact and _LONG in body.translate(_DIGITS):
        del value  # first: both at once take twice the memory
        value = json.loads(body)
    if not isinstance(value, dict):
        raise UserError(f"request body: found {type(value).__name__}, expected a JSON object")
    return value
