"""OpenAI-compatible requests sent to the samplers of one base model, and their answers relayed to clients."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import aiohttp
import orjson
from aiohttp import web

from skyrl_tinker.domain.ids import openai_session
from skyrl_tinker.domain.values import Usage
from skyrl_tinker.engine.openai.openai_call import Chunk, OpenAICall
from skyrl_tinker.engine.outbox import failure_of, persistently
from skyrl_tinker.engine.sampler.fleet import ATTEMPTS, Fleet
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.scheduling.priorities import share_of
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics, OutcomeLabel
from skyrl_tinker.errors import NotFoundError, SamplerError, SkyrlTinkerError
from skyrl_tinker.inference.constants import SESSION
from skyrl_tinker.protocol.schemas.openai import error_body
from skyrl_tinker.store import usage_records
from skyrl_tinker.store.store import Store

_PREFIX, _SUFFIX, _END = b"data: ", b"\n\n", b"[DONE]"
"""Prefix of events in a stream, and the text of its last one."""
ATTEMPTS_WITH_GRAMMAR = 2
T = TypeVar("T")
Refusal = Callable[[int, str], SkyrlTinkerError]


@dataclass(eq=False)
class OpenAIRelay:
    _store: Store
    _samplers: Samplers
    _fleet: Fleet
    _base_model: str
    _sampler_driver: SamplerDriver
    _metrics: Metrics

    def __post_init__(self) -> None:
        self._counting: set[asyncio.Task[None]] = set()

    async def complete(self, call: OpenAICall) -> web.Response:
        async with self._turn(call) as priority:
            response = call.read(await self.with_retry(call, lambda: self._send(call, priority)))
        self._count(call, response["usage"])
        return web.Response(body=call.encoded(response), content_type="application/json")

    async def _send(self, call: OpenAICall, priority: int) -> Any:
        async with self._samplers.leases.open(call.version) as name:
            with self._headers(call) as headers, call.naming_grammar():
                body = self.body(call, name, priority)
                return await self._fleet.client.data.openai(call.path, body, headers=headers)

    def body(self, call: OpenAICall, name: str, priority: int) -> dict[str, Any]:
        body = self._fleet.client.data.dialect.openai_body(call.body, name, priority)
        return {**body, **self._samplers.leases.cache_fields()}

    async def stream(
        self, http: web.Request, call: OpenAICall, upstream: AsyncExitStack
    ) -> tuple[web.StreamResponse, OutcomeLabel]:
        """Stream the answer; returns it with its outcome. `upstream`: left once the sampler has answered."""
        outcome: OutcomeLabel = "ok"
        priority = await upstream.enter_async_context(self._turn(call))
        chunks = await self.with_retry(call, lambda: self._open(call, priority, upstream))
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(http)
        try:
            async with _read_ahead(chunks, upstream) as ahead:
                async for chunk in ahead:
                    if forwarded := call.forwarded(chunk):
                        await response.write(_PREFIX + forwarded + _SUFFIX)
            await response.write(_PREFIX + _END + _SUFFIX)
        except SkyrlTinkerError as error:  # too late for a status
            outcome = error.category
            body = error_body(error, self._fleet.without_urls(failure_of(error).message))
            await response.write(_PREFIX + orjson.dumps(body) + _SUFFIX)
        await response.write_eof()
        return response, outcome

    async def _open(self, call: OpenAICall, priority: int, upstream: AsyncExitStack) -> AsyncIterator[Chunk]:
        """Open a stream; returns with the first chunk: before it, another replica may take over."""
        async with AsyncExitStack() as stack:
            name = await stack.enter_async_context(self._samplers.leases.open(call.version))
            body = self.body(call, name, priority)
            headers = stack.enter_context(self._headers(call))
            data = self._fleet.client.data
            with call.naming_grammar():
                pieces = await stack.enter_async_context(data.stream(call.path, body, headers=headers))
            chunks = self._counted(call, _chunks(pieces, data.dialect.refusal))
            first = await anext(chunks)
            upstream.push_async_exit(stack.pop_all())
            return _chained(first, chunks)

    async def _counted(self, call: OpenAICall, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        """Read the chunks, and count the tokens of all of them, even if the client leaves early."""
        usage: dict[str, Any] | None = None
        written: dict[int, int] = {}  # tokens, by choice
        try:
            with call.naming_grammar():
                async for written_chunk in chunks:
                    chunk = call.read(written_chunk)
                    so_far = chunk.get("usage")
                    if not chunk.get("choices"):
                        usage = so_far
                    elif so_far:
                        tokens = so_far["completion_tokens"]
                        written |= {choice["index"]: tokens for choice in chunk["choices"]}
                    yield chunk
        finally:
            if usage is None and written:
                usage = {"prompt_tokens": sum(call.prompts), "completion_tokens": sum(written.values())}
            if usage is not None:
                self._count(call, usage)

    @contextmanager
    def _headers(self, call: OpenAICall) -> Iterator[dict[str, str]]:
        """Return headers that route a request to a server that has cached its prefix (Affinity)."""
        prompt = orjson.dumps([call.body.get(name) for name in ("tools", "messages", "prompt")])
        with self._samplers.affinity.key(call.version, prompt, call.sequences) as key:
            yield {SESSION: key}

    @asynccontextmanager
    async def _turn(self, call: OpenAICall) -> AsyncIterator[int]:
        """Hold a turn among the samples; yields the request's priority in the sampler."""
        share = share_of(call.owner, openai_session(call.owner))
        async with self._sampler_driver.turn(call.owner, call.tokens, call.places):
            with self._samplers.priorities.take(share, call.tokens, call.sequences) as priority:
                yield priority

    def _count(self, call: OpenAICall, usage: dict[str, Any]) -> None:
        """Count the tokens of an answer, as for asample. No client waits for it, or fails with it."""
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        used = Usage(usage["prompt_tokens"], cached, usage.get("completion_tokens") or 0)
        self._metrics.sampled(self._base_model, used.output_tokens, call.owner)
        add = partial(usage_records.add_openai, owner=call.owner, base_model=self._base_model, usage=used)
        task = asyncio.create_task(persistently(self._store.write, add))
        self._counting.add(task)
        task.add_done_callback(self._counting.discard)

    async def with_retry(self, call: OpenAICall, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make an attempt, and others if the sampler died in it or had lost the adapter.

        A sampler may have died of a grammar: no third one is tried with it.
        """
        attempts = ATTEMPTS if call.request.restricted_by is None else ATTEMPTS_WITH_GRAMMAR
        try:
            return await self._fleet.with_retry(attempt, attempts)
        except NotFoundError:
            return await self._fleet.with_retry(attempt, attempts)


async def _chunks(pieces: AsyncIterator[bytes], refusal: Refusal) -> AsyncIterator[Chunk]:
    """Yield the chunks in a stream of events.

    Raises SamplerError if it breaks off, and the error that the sampler reports in it.
    """
    rest = b""
    try:
        async for piece in pieces:
            *events, rest = (rest + piece).split(_SUFFIX)
            for event in events:
                if (said := event.removeprefix(_PREFIX)) == _END:
                    return
                chunk = orjson.loads(said)
                if error := chunk.get("error"):
                    raise refusal(error["code"], error["message"])
                yield chunk
    except aiohttp.ClientError as error:
        raise SamplerError(f"the sampler closed the stream early: {error!r}") from error
    raise SamplerError("the sampler closed the stream early")


@asynccontextmanager
async def _read_ahead(
    chunks: AsyncIterator[Chunk], upstream: AsyncExitStack
) -> AsyncIterator[AsyncIterator[Chunk]]:
    """Buffer the chunks as fast as they arrive, and leave `upstream` after the last one.

    A client that reads slowly, or has stopped reading, must not keep weights in use.
    """
    buffer: asyncio.Queue[Chunk | None] = asyncio.Queue()

    async def read() -> None:
        try:
            async with upstream:
                async for chunk in chunks:
                    buffer.put_nowait(chunk)
        finally:
            buffer.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        yield _buffered(buffer, reader)
    finally:
        reader.cancel()
        await asyncio.wait((reader,))


async def _buffered(buffer: asyncio.Queue[Chunk | None], reader: asyncio.Task[None]) -> AsyncIterator[Chunk]:
    while (chunk := await buffer.get()) is not None:
        yield chunk
    await reader  # raises the reader's error


async def _chained(first: Chunk, rest: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    yield first
    async for chunk in rest:
        yield chunk
