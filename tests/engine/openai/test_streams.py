"""Events of vLLM's streams, as vLLM 0.32 writes them: chunks, errors after the status, and the end."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from skyrl_tinker.engine.openai.openai_call import Chunk
from skyrl_tinker.engine.openai.openai_relay import _chunks
from skyrl_tinker.errors import NotFoundError, SamplerError, UserError
from skyrl_tinker.inference.vllm.vllm_dialect import VLLM

CHUNK: Chunk = {"choices": [{"index": 0, "text": "a"}]}


def event(content: Any) -> bytes:
    return b"data: " + (b"[DONE]" if content is None else json.dumps(content).encode()) + b"\n\n"


async def pieces(stream: bytes, size: int = 7) -> AsyncIterator[bytes]:
    for start in range(0, len(stream), size):
        yield stream[start : start + size]


def failure(code: int) -> Chunk:
    return {
        "error": {"message": "EngineCore died", "type": "InternalServerError", "param": None, "code": code}
    }


async def test_chunks_come_until_the_end() -> None:
    chunks = _chunks(pieces(event(CHUNK) * 2 + event(None)), VLLM.refusal)
    assert [chunk async for chunk in chunks] == [CHUNK, CHUNK]


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (500, SamplerError, "the sampler answered 500: EngineCore died"),
        (400, UserError, "EngineCore died"),
        (404, NotFoundError, "EngineCore died"),
    ],
)
async def test_an_error_in_a_stream_is_an_error_not_text(
    before: int, code: int, error: type[Exception], message: str
) -> None:
    """So another replica takes over before the first chunk, and later the client is told."""
    chunks = _chunks(pieces(event(CHUNK) * before + event(failure(code)) + event(None)), VLLM.refusal)
    assert [await anext(chunks) for _ in range(before)] == [CHUNK] * before
    with pytest.raises(error, match=message):
        await anext(chunks)


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    with pytest.raises(SamplerError, match="closed the stream early"):
        [chunk async for chunk in _chunks(pieces(event(CHUNK)), VLLM.refusal)]
