"""A sampler's answer whose numbers are arrays: 4 bytes each, not text and objects of JSON.

The length of a header (uint32), the header, its arrays. The header is the sampler's JSON; in it an object
{"array": type, "shape": [...]} stands for the next array, row by row, little-endian.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

PACKED = "application/x-skyrl-tinker-arrays"
"""Media type that a client accepts and a sampler with our plugin then answers with."""
_ARRAY = "array"


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
