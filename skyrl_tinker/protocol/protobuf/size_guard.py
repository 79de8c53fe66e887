"""Bound on the parsed size of a protobuf message, checked before it is parsed.

A message may hold a million empty ones in two bytes each, which take fifty bytes each once parsed.
https://protobuf.dev/programming-guides/encoding/
"""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from skyrl_tinker.errors import TooLargeError

MAX_PARTS = 500_000
"""Most fields, including those of inner messages and each number of packed ones. 4096 datums have 115,000."""
UNCOUNTED_BYTES = 4 << 20
"""Shorter bodies stay small enough whatever they hold."""
_BYTES = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)
_OTHERS = {1: 8, 3: 0, 4: 0, 5: 4}
"""Length by wire type: fixed64, start and end of a group, fixed32."""


def check_parts(body: bytes, message: Any) -> None:
    """Raise TooLargeError for too many fields. A malformed body is counted up to its error."""
    if len(body) > UNCOUNTED_BYTES and count_parts(body, message, MAX_PARTS) > MAX_PARTS:
        raise TooLargeError(f"request body: found more than {MAX_PARTS} protobuf fields, expected fewer")


def count_parts(body: bytes, message: Any, most: int) -> int:
    """Count fields. `message`: its descriptor. Stops soon after `most`."""
    parts = 0
    left: list[tuple[int, int, Any]] = [(0, len(body), message)]
    while left and parts <= most:
        at, end, kind = left.pop()
        while at < end and parts <= most:
            tag, at = _varint(body, at, end)
            parts += 1
            if tag & 7 == 2:
                size, at = _varint(body, at, end)
                field = None if kind is None else kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    left.append((at, min(at + size, end), field.message_type))
                elif field is not None and field.type not in _BYTES:
                    parts += size
                at += size
            elif tag & 7 == 0:
                _, at = _varint(body, at, end)
            elif tag & 7 in _OTHERS:
                at += _OTHERS[tag & 7]
            else:  # an invalid wire type
                at = end
    return parts


def head(body: bytes) -> tuple[str, int] | None:
    """Return fields 1, a string, and 2, a number, if a message begins with them; else None."""
    if body[:1] != b"\x0a":
        return None
    size, at = _varint(body, 1, len(body))
    name, at = body[at : at + size], at + size
    if len(name) < size or body[at : at + 1] != b"\x10":
        return None
    number, _ = _varint(body, at + 1, len(body))
    return name.decode(errors="replace"), number


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the value of a varint and the position after it."""
    value = shift = 0
    while at < end:
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128 or shift > 63:
            break
        shift += 7
    return value, at
