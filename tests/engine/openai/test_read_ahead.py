"""A streaming client's speed is its own affair: weights are in use only as long as vLLM writes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from skyrl_tinker.engine.openai.openai_call import Chunk
from skyrl_tinker.engine.openai.openai_relay import _read_ahead
from skyrl_tinker.errors import SamplerError

CHUNKS: list[Chunk] = [{"id": "one"}, {"id": "two"}]


async def all_chunks() -> AsyncIterator[Chunk]:
    for chunk in CHUNKS:
        yield chunk


async def broken_off() -> AsyncIterator[Chunk]:
    yield CHUNKS[0]
    raise SamplerError("the sampler closed the stream early")


async def endless() -> AsyncIterator[Chunk]:
    yield CHUNKS[0]
    await asyncio.Event().wait()


async def test_weights_are_let_go_before_a_slow_client_has_read_anything() -> None:
    left, upstream = asyncio.Event(), AsyncExitStack()
    upstream.callback(left.set)
    async with _read_ahead(all_chunks(), upstream) as ahead:
        await left.wait()
        assert [chunk async for chunk in ahead] == CHUNKS


async def test_what_came_before_a_break_is_read_first() -> None:
    async with _read_ahead(broken_off(), AsyncExitStack()) as ahead:
        assert await anext(ahead) == CHUNKS[0]
        with pytest.raises(SamplerError, match="closed the stream early"):
            await anext(ahead)


async def test_a_client_that_leaves_lets_go_at_once() -> None:
    left, upstream = asyncio.Event(), AsyncExitStack()
    upstream.callback(left.set)
    async with _read_ahead(endless(), upstream) as ahead:
        assert await anext(ahead) == CHUNKS[0]
    assert left.is_set()
