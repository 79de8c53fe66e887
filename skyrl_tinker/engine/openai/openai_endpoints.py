"""The OpenAI-compatible routes: a base model's name or a tinker:// path in, vLLM's own answer out."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import aiohttp
import orjson
from aiohttp import web

from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.ids import CheckpointKind, OwnerId
from skyrl_tinker.domain.values import BaseModelFacts, WeightVersion
from skyrl_tinker.engine.engine_metrics import Metrics
from skyrl_tinker.engine.openai.openai_requests import Wanted, longest_prompt, texts_to_count, upstream_body
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.errors import NotFoundError, SamplerError, SkyrlTinkerError
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.protocol.schemas.openai import (
    OWNER_HEADER,
    ChatCompletionRequest,
    CompletionRequest,
    FieldError,
    error_body,
    parse_openai,
)
from skyrl_tinker.store import checkpoint_records, sampling_sessions
from skyrl_tinker.store.store import Store

PREFIX = "/oai/api/v1"
_AFFINITY_BYTES = 512
_END = b"[DONE]"
T = TypeVar("T")
Path = Literal["/v1/completions", "/v1/chat/completions"]


@dataclass(frozen=True, slots=True)
class _OpenAICall:
    """One request as vLLM gets it, but for the name of the model."""

    wanted: Wanted
    version: WeightVersion | None
    body: dict[str, Any]

    @property
    def path(self) -> Path:
        return "/v1/chat/completions" if isinstance(self.wanted, ChatCompletionRequest) else "/v1/completions"

    @property
    def headers(self) -> dict[str, str]:
        """Requests that can share cached prefixes go to the same server."""
        digest = hashlib.sha256((self.version.name if self.version else BASE_MODEL).encode())
        digest.update(orjson.dumps(self.body.get("messages", self.body.get("prompt")))[:_AFFINITY_BYTES])
        return {"X-Session-ID": digest.hexdigest()[:32]}

    def renamed(self, answer: dict[str, Any]) -> bytes:
        """The client reads the name that it gave."""
        return orjson.dumps(answer | {"model": self.wanted.model} if "model" in answer else answer)


class OpenAIServer:
    def __init__(
        self, store: Store, samplers: Samplers, fleet: Fleet, facts: BaseModelFacts, metrics: Metrics
    ) -> None:
        self._store = store
        self._samplers = samplers
        self._fleet = fleet
        self._facts = facts
        self._metrics = metrics

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(f"{PREFIX}/completions", self._completions),
            web.post(f"{PREFIX}/chat/completions", self._chat),
        ]

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, CompletionRequest, "completion")

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, ChatCompletionRequest, "chat_completion")

    async def _answer(self, http: web.Request, model: type[Wanted], kind: str) -> web.StreamResponse:
        try:
            call = await self._prepare(parse_openai(model, orjson.loads(await http.read())), _owner(http))
            answer = await (self._stream(http, call) if call.wanted.stream else self._whole(call))
        except SkyrlTinkerError as error:
            self._metrics.counted(kind, error.category)
            return web.json_response(error_body(error), status=error.status)
        except (asyncio.CancelledError, ConnectionResetError):  # the client is gone
            self._metrics.counted(kind, "cancelled")
            raise
        self._metrics.counted(kind, "ok")
        return answer

    # From what the client asks to what vLLM is asked

    async def _prepare(self, wanted: Wanted, owner: OwnerId | None) -> _OpenAICall:
        version = await self._target(wanted.model, owner)
        counts = await asyncio.gather(*(self._count(each) for each in texts_to_count(wanted, self._facts)))
        length = longest_prompt(wanted, counts, self._facts)
        return _OpenAICall(wanted, version, upstream_body(wanted, length, self._facts))

    async def _target(self, model: str, owner: OwnerId | None) -> WeightVersion | None:
        """None: the base model. NotFoundError; FieldError for another kind of checkpoint."""
        if model in self._facts.names:
            return None
        if not model.startswith(tinker_path.SCHEME):
            raise NotFoundError(
                f"no model {model!r}: expected {' or '.join(self._facts.names)}, or a tinker:// path"
            )
        wanted = tinker_path.parse(model)
        if wanted.kind is not CheckpointKind.SAMPLER_WEIGHTS:
            raise FieldError(f"{model} has no weights for sampling: use save_weights_for_sampler", "model")
        with self._store.read() as conn:
            row = checkpoint_records.find(conn, owner, wanted.model_id, wanted.kind, wanted.name)
            version = (
                sampling_sessions.published_version(conn, row.version_id) if row and row.version_id else None
            )
        if row is None or version is None:
            raise NotFoundError(f"no checkpoint {model}: it was never saved, or it is deleted or expired")
        self._samplers.require_served(row.base_model)
        return version

    async def _count(self, text: dict[str, Any]) -> int:
        """Tokens of a prompt. Every version has the tokenizer of the base model."""
        body = {"model": BASE_MODEL, **text}
        answer = await self._fleet.surviving(lambda: self._fleet.client.tokenize(body))
        return int(answer["count"])

    # To vLLM and back

    async def _whole(self, call: _OpenAICall) -> web.Response:
        answer = await self._persistently(lambda: self._ask(call))
        self._metrics.sampled_tokens(answer["usage"].get("completion_tokens") or 0)
        return web.Response(body=call.renamed(answer), content_type="application/json")

    async def _ask(self, call: _OpenAICall) -> Any:
        client = self._fleet.client
        chat = isinstance(call.wanted, ChatCompletionRequest)
        async with self._samplers.serving(call.version) as name:
            ask = client.chat_completion if chat else client.completion
            return await ask(call.body | {"model": name}, headers=call.headers)

    async def _stream(self, http: web.Request, call: _OpenAICall) -> web.StreamResponse:
        async with AsyncExitStack() as upstream:
            events = await self._persistently(lambda: self._open(call, upstream))
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            )
            await response.prepare(http)
            try:
                async with _read_ahead(events, upstream) as ahead:
                    async for event in ahead:
                        if passed_on := self._passed_on(call, event):
                            await response.write(b"data: " + passed_on + b"\n\n")
            except SamplerError as error:  # too late for a status
                await response.write(b"data: " + orjson.dumps(error_body(error)) + b"\n\n")
            await response.write_eof()
        return response

    async def _open(self, call: _OpenAICall, upstream: AsyncExitStack) -> AsyncIterator[bytes]:
        """Events, once the first is here: until then another replica may take over."""
        async with AsyncExitStack() as stack:
            name = await stack.enter_async_context(self._samplers.serving(call.version))
            stream = self._fleet.client.stream(call.path, call.body | {"model": name}, headers=call.headers)
            events = _events(await stack.enter_async_context(stream))
            first = await anext(events)
            upstream.push_async_exit(stack.pop_all())
            return _chained(first, events)

    def _passed_on(self, call: _OpenAICall, event: bytes) -> bytes | None:
        """vLLM always tells the usage, for the metrics; the client learns it if it asked."""
        if event == _END:
            return event
        chunk = orjson.loads(event)
        if chunk.get("choices") == []:
            self._metrics.sampled_tokens(chunk["usage"]["completion_tokens"])
            options = call.wanted.stream_options
            if options is None or not options.include_usage:
                return None
        return call.renamed(chunk)

    async def _persistently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Tried again when vLLM died under it, or had lost the adapter."""
        try:
            return await self._fleet.surviving(attempt)
        except NotFoundError:
            return await self._fleet.surviving(attempt)


def _owner(http: web.Request) -> OwnerId | None:
    """As the API says: only it can connect."""
    owner = http.headers.get(OWNER_HEADER)
    return None if owner is None else OwnerId(int(owner))


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The payloads of a stream, [DONE] last. SamplerError when it breaks off."""
    left, event = b"", b""
    try:
        async for piece in pieces:
            *events, left = (left + piece).split(b"\n\n")
            for each in events:
                event = each.removeprefix(b"data: ")
                yield event
    except aiohttp.ClientError as error:
        raise SamplerError(f"the sampler broke off: {error!r}") from error
    if event != _END:
        raise SamplerError("the sampler broke off")


@asynccontextmanager
async def _read_ahead(
    events: AsyncIterator[bytes], upstream: AsyncExitStack
) -> AsyncIterator[AsyncIterator[bytes]]:
    """The same events, taken as fast as they come, `upstream` left behind the last one: a client that reads
    slowly, or no more, must not keep weights in use that others make room for."""
    taken: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def take() -> None:
        try:
            async with upstream:
                async for event in events:
                    taken.put_nowait(event)
        finally:
            taken.put_nowait(None)

    taking = asyncio.create_task(take())
    try:
        yield _emptied(taken, taking)
    finally:
        taking.cancel()
        await asyncio.wait((taking,))


async def _emptied(taken: asyncio.Queue[bytes | None], taking: asyncio.Task[None]) -> AsyncIterator[bytes]:
    while (event := await taken.get()) is not None:
        yield event
    await taking  # raises what it broke off with


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event
