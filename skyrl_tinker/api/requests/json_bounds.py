"""JSON parser with bounds on the number of parts and on the depth."""

import re

import orjson

from skyrl_tinker.errors import TooLargeError, UserError

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
