"""OpenAI-compatible requests of one base model, answered by its samplers."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import aiohttp
import orjson
from aiohttp import web

from skyrl_tinker.domain.ids import OwnerId, openai_session
from skyrl_tinker.domain.samples import LISTED_PER_PLACE
from skyrl_tinker.domain.values import BaseModelFacts, Usage, WeightVersion
from skyrl_tinker.engine.openai.chat_abilities import ChatAbilities
from skyrl_tinker.engine.openai.grammar_turns import GrammarTurns
from skyrl_tinker.engine.openai.openai_requests import (
    OpenAIRequest,
    listed,
    prompt_lengths,
    repeated,
    require_one_sequence,
    texts_to_count,
    upstream_body,
)
from skyrl_tinker.engine.outbox import failure_of, persistently
from skyrl_tinker.engine.sampler.fleet import ATTEMPTS, Fleet
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.scheduling.priorities import share_of
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics, OutcomeLabel
from skyrl_tinker.errors import NotFoundError, RequestGivenUpError, SamplerError, SkyrlTinkerError, UserError
from skyrl_tinker.inference.client.sampling_port import AnswerReader
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.protocol.schemas.chats import ChatCompletionRequest
from skyrl_tinker.protocol.schemas.openai import FieldError, error_body
from skyrl_tinker.store import usage_records
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.atomic_directory import storage_errors
from skyrl_tinker.system.off_loop import in_disk_thread, off_loop

_PREFIX, _SUFFIX, _END = b"data: ", b"\n\n", b"[DONE]"
"""Prefix of events in a stream, and the text of its last one."""
_GIVEN_UP = (
    "it gave up, as where a schema refers to itself without an end, where a pattern is none, or where "
    "weights have diverged"
)
ATTEMPTS_WITH_GRAMMAR = 2
_SHORTEST: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "n": 1,
    "max_tokens": 1,
    "stream": False,
    "stream_options": None,
}
"""Fields of a chat that a sampler answers as soon as it has compiled the grammar."""
T = TypeVar("T")
Chunk = dict[str, Any]
Refusal = Callable[[int, str], SkyrlTinkerError]
Path = Literal["/v1/completions", "/v1/chat/completions"]


@dataclass(frozen=True, slots=True)
class _OpenAICall:
    """Request in the sampler's format, without the fields of its dialect. `prompts`: token count of each."""

    request: OpenAIRequest
    owner: OwnerId | None
    version: WeightVersion | None
    prompts: list[int]
    body: dict[str, Any]
    read: AnswerReader

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.request.sequences

    @property
    def places(self) -> int:
        """Places that it takes among sequences in flight (SampleRequest.places); this text takes fourfold."""
        return max(self.sequences, 4 * listed(self.request, sum(self.prompts)) // LISTED_PER_PLACE)

    @property
    def tokens(self) -> int:
        """Tokens of the prompts, and the most that it generates in its places (SampleRequest.tokens)."""
        return sum(self.prompts) + self.places * int(self.body["max_tokens"])

    @property
    def path(self) -> Path:
        chat = isinstance(self.request, ChatCompletionRequest)
        return "/v1/chat/completions" if chat else "/v1/completions"

    @property
    def grammar(self) -> bytes:
        """Digest of what samplers make a grammar of: no names of schemas, no descriptions of tools."""
        form, calls = self.body.get("response_format") or {}, self.body.get("parallel_tool_calls")
        functions = [tool["function"] for tool in self.body.get("tools") or ()]
        tools = [[each.get(key) for key in ("name", "strict", "parameters")] for each in functions]
        schema = (form.get("json_schema") or {}).get("schema")
        return hashlib.sha256(orjson.dumps([form.get("type"), schema, tools, calls])).digest()

    @contextmanager
    def naming_grammar(self) -> Iterator[None]:
        """Raise FieldError where the sampler refuses, or gives up, a request that a grammar restricts.

        Its lengths and tokens were checked, and samplers go on: another one would do the same.
        """
        try:
            yield
        except (UserError, RequestGivenUpError) as error:
            field = self.request.restricted_by
            if field is None or isinstance(error, FieldError | NotFoundError):
                raise
            why = _GIVEN_UP if isinstance(error, RequestGivenUpError) else str(error)
            raise FieldError(f"{field}: the sampler makes no answer that fits it: {why}", field) from error

    def encoded(self, response: dict[str, Any]) -> bytes:
        """Encode a response, or a chunk of one, with all choices, under the client's name for the model."""
        if (copies := self.request.n // self.request.sequences) > 1:
            response = repeated(response, copies)
        return orjson.dumps(response | {"model": self.request.model} if "model" in response else response)


@dataclass(eq=False)
class OpenAIServer:
    _store: Store
    _samplers: Samplers
    _fleet: Fleet
    facts: BaseModelFacts
    _read_abilities: Callable[[], ChatAbilities]
    _sampler_driver: SamplerDriver
    _metrics: Metrics

    def __post_init__(self) -> None:
        self._abilities: ChatAbilities | None = None
        self._grammars = GrammarTurns()
        self._counting: set[asyncio.Task[None]] = set()

    async def answer(
        self,
        http: web.Request,
        request: OpenAIRequest,
        size: int,
        owner: OwnerId | None,
        version: WeightVersion | None,
    ) -> tuple[web.StreamResponse, OutcomeLabel]:
        """Answer a request whose body has `size` bytes; returns the answer with its outcome.

        `version`: to sample, None for the base model. Raises SkyrlTinkerError before the answer has begun.
        """
        async with AsyncExitStack() as upstream:
            with self._sampler_driver.arriving():
                abilities = await self.abilities()
                texts = await off_loop(size, lambda: texts_to_count(request, self.facts, abilities))
                await upstream.enter_async_context(self._samplers.gate.passage())
                call = await self._prepare(request, texts, size, owner, version)
                if call.request.restricted_by is not None:
                    await self._compiled(call)
            if call.request.stream:
                return await self._stream(http, call, upstream)
            return await self._complete(call), "ok"

    # From the client's request to the sampler's

    async def _prepare(
        self,
        request: OpenAIRequest,
        texts: Sequence[dict[str, Any]],
        size: int,
        owner: OwnerId | None,
        version: WeightVersion | None,
    ) -> _OpenAICall:
        """Prepare a request, with the files of its version here. Call it before taking a turn.

        `texts`: its texts_to_count.
        """
        facts, abilities = self.facts, await self.abilities()
        await self._samplers.fetch(version)
        counts = await asyncio.gather(*(self._count_tokens(text) for text in texts))
        prompts = await off_loop(size, lambda: prompt_lengths(request, counts, facts))
        if self._fleet.disaggregated:
            require_one_sequence(request, len(prompts))
        body = await off_loop(size, lambda: upstream_body(request, max(prompts), facts, abilities))
        reader = self._fleet.client.data.dialect.openai_reader(body)
        return _OpenAICall(request, owner, version, prompts, body, reader)

    async def abilities(self) -> ChatAbilities:
        """Return abilities, read with the first request: one base model's files must not end the engine."""
        if self._abilities is None:
            with storage_errors("the tokenizer's files cannot be read"):
                self._abilities = await in_disk_thread(self._read_abilities)
        return self._abilities

    async def _count_tokens(self, text: dict[str, Any]) -> int:
        """Count the tokens of a prompt. Every version has the tokenizer of the base model."""
        return len(await self._fleet.with_retry(lambda: self._fleet.client.data.tokenize(text)))

    async def _compiled(self, call: _OpenAICall) -> None:
        """Return once each replica has compiled the request's grammar. Call it before taking a turn."""
        share, known_by = share_of(call.owner, openai_session(call.owner)), self._fleet.generation
        attempt = partial(self._with_retry, call, lambda: self._compile(call))
        await self._grammars.compiled(share, (known_by, call.grammar), attempt)

    async def _compile(self, call: _OpenAICall) -> bool:
        """Have each replica compile the request's grammar, the first one alone: it may die of it.

        The grammar is that of the tokenizer, which all versions share: it needs no weights of its own.
        Returns False if a replica gave the token up, perhaps as others have diverged: the request tells.
        """
        async with self._fleet.placement.sampling():
            body = self._body(replace(call, body={**call.body, **_SHORTEST}), BASE_MODEL, 0)
            data, urls = self._fleet.client.data, self._fleet.client.server_urls

            async def on(url: str) -> bool:
                with suppress(RequestGivenUpError):
                    await data.openai(call.path, body, server=url)
                    return True
                return False

            with call.naming_grammar():
                compiled = [
                    each for some in (urls[:1], urls[1:]) for each in await asyncio.gather(*map(on, some))
                ]
            return all(compiled)

    # To the sampler and back

    async def _complete(self, call: _OpenAICall) -> web.Response:
        async with self._turn(call) as priority:
            response = call.read(await self._with_retry(call, lambda: self._send(call, priority)))
        self._count(call, response["usage"])
        return web.Response(body=call.encoded(response), content_type="application/json")

    async def _send(self, call: _OpenAICall, priority: int) -> Any:
        async with self._samplers.leases.open(call.version) as name:
            with self._headers(call) as headers, call.naming_grammar():
                body = self._body(call, name, priority)
                return await self._fleet.client.data.openai(call.path, body, headers=headers)

    def _body(self, call: _OpenAICall, name: str, priority: int) -> dict[str, Any]:
        body = self._fleet.client.data.dialect.openai_body(call.body, name, priority)
        return {**body, **self._samplers.leases.cache_fields()}

    async def _stream(
        self, http: web.Request, call: _OpenAICall, upstream: AsyncExitStack
    ) -> tuple[web.StreamResponse, OutcomeLabel]:
        """Stream the answer; returns it with its outcome. `upstream`: left once the sampler has answered."""
        outcome: OutcomeLabel = "ok"
        priority = await upstream.enter_async_context(self._turn(call))
        chunks = await self._with_retry(call, lambda: self._open(call, priority, upstream))
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(http)
        try:
            async with _read_ahead(chunks, upstream) as ahead:
                async for chunk in ahead:
                    if forwarded := _forwarded(call, chunk):
                        await response.write(_PREFIX + forwarded + _SUFFIX)
            await response.write(_PREFIX + _END + _SUFFIX)
        except SkyrlTinkerError as error:  # too late for a status
            outcome = error.category
            body = error_body(error, self._fleet.without_urls(failure_of(error).message))
            await response.write(_PREFIX + orjson.dumps(body) + _SUFFIX)
        await response.write_eof()
        return response, outcome

    async def _open(self, call: _OpenAICall, priority: int, upstream: AsyncExitStack) -> AsyncIterator[Chunk]:
        """Open a stream; returns with the first chunk: before it, another replica may take over."""
        async with AsyncExitStack() as stack:
            name = await stack.enter_async_context(self._samplers.leases.open(call.version))
            body = self._body(call, name, priority)
            headers = stack.enter_context(self._headers(call))
            data = self._fleet.client.data
            with call.naming_grammar():
                pieces = await stack.enter_async_context(data.stream(call.path, body, headers=headers))
            chunks = self._counted(call, _chunks(pieces, data.dialect.refusal))
            first = await anext(chunks)
            upstream.push_async_exit(stack.pop_all())
            return _chained(first, chunks)

    async def _counted(self, call: _OpenAICall, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
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
    def _headers(self, call: _OpenAICall) -> Iterator[dict[str, str]]:
        """Return headers that route a request to a server that has cached its prefix (Affinity)."""
        prompt = orjson.dumps([call.body.get(name) for name in ("tools", "messages", "prompt")])
        with self._samplers.affinity.key(call.version, prompt, call.sequences) as key:
            yield {"X-Session-ID": key}

    @asynccontextmanager
    async def _turn(self, call: _OpenAICall) -> AsyncIterator[int]:
        """Hold a turn among the samples; yields the request's priority in the sampler."""
        share = share_of(call.owner, openai_session(call.owner))
        async with self._sampler_driver.turn(call.owner, call.tokens, call.places):
            with self._samplers.priorities.take(share, call.tokens, call.sequences) as priority:
                yield priority

    def _count(self, call: _OpenAICall, usage: dict[str, Any]) -> None:
        """Count the tokens of an answer, as for asample. No client waits for it, or fails with it."""
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        used = Usage(usage["prompt_tokens"], cached, usage.get("completion_tokens") or 0)
        name = self.facts.name
        self._metrics.sampled_tokens(name, used.output_tokens, call.owner)
        add = partial(usage_records.add_openai, owner=call.owner, base_model=name, usage=used)
        task = asyncio.create_task(persistently(lambda: self._store.write(add)))
        self._counting.add(task)
        task.add_done_callback(self._counting.discard)

    async def _with_retry(self, call: _OpenAICall, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make an attempt, and others if the sampler died in it or had lost the adapter.

        A sampler may have died of a grammar: no third one is tried with it.
        """
        attempts = ATTEMPTS if call.request.restricted_by is None else ATTEMPTS_WITH_GRAMMAR
        try:
            return await self._fleet.with_retry(attempt, attempts)
        except NotFoundError:
            return await self._fleet.with_retry(attempt, attempts)


def _forwarded(call: _OpenAICall, chunk: Chunk) -> bytes | None:
    """Return the chunk without usage that the client did not request; None if nothing is left."""
    options = call.request.stream_options
    if chunk.get("choices"):
        chunk.pop("usage", None)
    elif "usage" in chunk and (options is None or not options.include_usage):
        return None
    return call.encoded(chunk)


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
