"""JSON parser with bounds on the number of parts and on the depth."""

import re

import orjson

from skyrl_tinker.errors import TooLargeError, UserError

MAX_DEPTH = 64
MAX_ITEMS = 2_000_000
"""Commas: a parsed number takes about 40 bytes."""
MAX_OBJECTS = 1_000_000
"""Brackets and quotes: an empty list of two bytes takes 64 once it is parsed."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # possessive: no memory for each escape
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def parse_json(body: bytes) -> object:
    """Parse the body. UserError if it is not JSON, or has more than MAX_ITEMS, MAX_OBJECTS or MAX_DEPTH."""
    _check_parts(body)
    try:
        value: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UserError(f"request body: not valid JSON: {error}") from error
    _check_depth(body)
    return value


def _check_parts(body: bytes) -> None:
    commas = body.count(b",")
    if commas > MAX_ITEMS:
        raise TooLargeError(f"request body: found {commas} commas, expected at most {MAX_ITEMS}")
    objects = sum(body.count(sign) for sign in (b"[", b"{", b'"'))
    if objects > MAX_OBJECTS:
        raise TooLargeError(
            f"request body: found {objects} opening brackets and quotes, expected at most {MAX_OBJECTS}"
        )


def _check_depth(body: bytes) -> None:
    """Check valid JSON: each iteration removes the innermost brackets, at the speed of C."""
    brackets = _STRING.sub(b"", body).translate(_ONE_KIND, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise UserError(f"request body: nested deeper than {MAX_DEPTH} levels")
