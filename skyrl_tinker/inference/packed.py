"""A sampler's answer in which tokens and logprobs are arrays: 8 bytes per token, not an object of JSON.

The length of a header (uint32), the header, the tokens of all choices (int32), their logprobs (float32); all
little-endian. The header is the sampler's JSON, whose choices have `length`, their number of tokens.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

PACKED = "application/x-skyrl-tinker-packed"
"""Media type that a client accepts and a sampler with our plugin then answers with."""


def pack(payload: Mapping[str, Any], tokens: Sequence[Sequence[int]], logprobs: Sequence[Any]) -> bytes:
    """Pack an answer; `tokens` and `logprobs` (float32): [length] of each choice, in order."""
    choices = [
        {**choice, "length": len(each)} for choice, each in zip(payload["choices"], tokens, strict=True)
    ]
    for each, scored in zip(tokens, logprobs, strict=True):
        if len(each) != len(scored):  # else the logprobs of later choices would be shifted
            raise RuntimeError(f"found logprobs of {len(scored)} of {len(each)} tokens")
    header = json.dumps({**payload, "choices": choices}).encode()
    arrays = [*(np.asarray(each, "<i4") for each in tokens), *(np.asarray(each, "<f4") for each in logprobs)]
    return b"".join([len(header).to_bytes(4, "little"), header, *(array.tobytes() for array in arrays)])


def unpack(content: bytes) -> dict[str, Any]:
    """Return the sampler's JSON; `token_ids` and `logprobs` of its choices are lists of numbers."""
    behind = 4 + int.from_bytes(content[:4], "little")
    payload: dict[str, Any] = json.loads(content[4:behind])
    choices = payload["choices"]
    bounds = list(pairwise(accumulate((choice["length"] for choice in choices), initial=0)))
    count = bounds[-1][1] if bounds else 0
    tokens = np.frombuffer(content, "<i4", count, behind).tolist()
    logprobs = np.frombuffer(content, "<f4", count, behind + 4 * count).tolist()
    for choice, (start, end) in zip(choices, bounds, strict=True):
        choice |= {"token_ids": tokens[start:end], "logprobs": logprobs[start:end]}
    return payload
