"""Samples over a sampler's WebSocket, and answers whose numbers are arrays: 4 bytes each, not text of JSON.

A request is its id, its session's key and the sampler's JSON, line by line; an id alone ends that request.
Its answer is the id, an HTTP status and the content: JSON from status 400 on, else packed. That is the length
of a header (uint32), the header, its arrays. The header is the sampler's JSON; in it an object
{"array": type, "shape": [...]} stands for the next array, row by row, little-endian.

Those that are ready at the same time share a message, each behind its length (uint64).
"""

import asyncio
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_tinker.domain.units import KiB

PROTOCOL = "skyrl-tinker.samples.1"
"""WebSocket subprotocol of this form; a change of the form takes the next number."""
OTHERWISE = 415
"""Status of a request that arrays do not answer: it is to be made by HTTP."""
TOGETHER_BYTES = 256 * KiB
"""Bytes from which a message takes no more."""
_ARRAY = "array"
_LENGTH = 8


class Outgoing:
    """Requests, or answers, that wait for their connection."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()

    def put(self, part: bytes) -> None:
        self._queue.put_nowait(part)

    async def message(self) -> bytes:
        """Wait for one, and return it with those that wait behind it."""
        parts = [await self._queue.get()]
        size = len(parts[0])
        while size < TOGETHER_BYTES and not self._queue.empty():
            parts.append(self._queue.get_nowait())
            size += len(parts[-1])
        return together(parts)


def together(parts: Iterable[bytes]) -> bytes:
    """Make a message of requests, or of answers."""
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(_LENGTH, "little"), part))


def parts_of(message: bytes) -> Iterator[bytes]:
    """Yield the requests or answers of a message."""
    begin = 0
    while begin < len(message):
        start = begin + _LENGTH
        begin = start + int.from_bytes(message[begin:start], "little")
        yield message[start:begin]


def ask(request_id: str, session_key: str, content: bytes) -> bytes:
    return b"\n".join((request_id.encode(), session_key.encode(), content))


def asked(message: bytes) -> tuple[str, str, bytes]:
    """Read the message of `ask`, or an id alone, with nothing else."""
    request_id, _, rest = message.partition(b"\n")
    session_key, _, content = rest.partition(b"\n")
    return request_id.decode(), session_key.decode(), content


def tell(request_id: str, status: int, content: bytes) -> bytes:
    return b"\n".join((request_id.encode(), str(status).encode(), content))


def told(message: bytes) -> tuple[str, int, bytes]:
    """Read the message of `tell`."""
    request_id, status, content = message.split(b"\n", 2)
    return request_id.decode(), int(status), content


def pack(payload: Mapping[str, Any]) -> bytes:
    """Pack an answer with arrays at any place."""
    arrays: list[bytes] = []

    def describe(array: npt.NDArray[Any]) -> dict[str, Any]:
        ordered = array.astype(array.dtype.newbyteorder("<"), copy=False)
        arrays.append(ordered.tobytes())
        return {_ARRAY: ordered.dtype.str, "shape": ordered.shape}

    header = json.dumps(payload, default=describe).encode()
    return b"".join([len(header).to_bytes(4, "little"), header, *arrays])


def unpack(content: bytes) -> dict[str, Any]:
    """Return the sampler's JSON with its arrays, which are read-only views of `content`."""
    behind = 4 + int.from_bytes(content[:4], "little")

    def restore(found: dict[str, Any]) -> Any:
        nonlocal behind
        if _ARRAY not in found:
            return found
        shape = found["shape"]
        array = np.frombuffer(content, found[_ARRAY], math.prod(shape), behind).reshape(shape)
        behind += array.nbytes
        return array

    payload: dict[str, Any] = json.loads(content[4:behind], object_hook=restore)
    return payload
