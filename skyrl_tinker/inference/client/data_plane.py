"""The data plane: requests that any replica may serve."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from skyrl_tinker.domain.samples import SampleRequest
from skyrl_tinker.domain.units import KiB
from skyrl_tinker.errors import SamplerPausedError
from skyrl_tinker.inference.client.generated import SamplerResponse
from skyrl_tinker.inference.client.http_connection import HttpAnswer, HttpStatusError, JsonHttp
from skyrl_tinker.inference.client.in_flight import InFlight
from skyrl_tinker.inference.client.sampling_port import Dialect, Json
from skyrl_tinker.inference.constants import BASE_MODEL, MAX_SEQUENCES, REPLICA, SESSION

ON_LOOP_BYTES = 64 * KiB
"""Largest answer that is parsed on the event loop: a longer one, as of listed logprobs, would block it."""
PAUSED_S = 0.2
"""Seconds between the tries of a call that a paused server refuses."""
T = TypeVar("T")
Headers = Mapping[str, str]
StreamPath = Literal["/inference/v1/generate", "/v1/completions", "/v1/chat/completions"]


@dataclass
class DataPlane:
    """`proxy_url`: the router, or the server itself if there is only one.

    `straight`: the servers to which samples go without a router, each session key to one of them. Bodies and
    answers of `generate` are those of the engine's HTTP API. Raises NotFoundError for an unknown model,
    UserError if the sampler refused the request, SamplerError if it could not be served.
    """

    dialect: Dialect
    proxy_url: str
    straight: tuple[str, ...] = ()
    http: JsonHttp = field(default_factory=JsonHttp)
    in_flight: InFlight = field(default_factory=InFlight)
    most_sequences: int = MAX_SEQUENCES
    """Most sequences of one request."""

    async def sample(
        self,
        model: str,
        request: SampleRequest,
        session_key: str,
        eos: tuple[int, ...],
        context: int,
        tag: str | None,
        *,
        interruptible: bool = False,
        priority: int = 0,
        fields: Json = MappingProxyType({}),
    ) -> SamplerResponse:
        """Make one request, for at most `most_sequences` samples (sample_parts.split).

        `eos` ends sequences unless request.params.stop is (); `context` bounds max_tokens None. The lowest
        `priority` goes first (Priorities). `fields`: further fields of the request. Unfinished sequences come
        back as `abort` when samplers are paused or SamplerControl.abort(tag) is called; `interruptible` ones
        also at SamplerControl.interrupt(model).
        Raises NotFoundError if the adapter is not loaded (load it again).
        """
        body = self.dialect.body(model, request, eos=eos, context=context)
        with self.in_flight.attempt(tag, model if interruptible else None) as attempt:
            named, headers = self.dialect.call(request, attempt.id, priority)
            body |= {**named, **fields}
            headers[SESSION] = session_key
            channel = attempt.id if self.straight and self.dialect.channels else ""
            server = self._server_of(session_key)
            answer = await self._answer(self.dialect.path, body, headers, server, channel)
        replica, switched = answer.headers.get(REPLICA), attempt.switched
        parse = partial(
            self.dialect.parse, answer.content, request, model=model, switched=switched, replica=replica
        )
        return await asyncio.to_thread(parse) if answer.size > ON_LOOP_BYTES else parse()

    async def generate(self, body: Json, *, headers: Headers | None = None) -> Any:
        """Generate with token ids in and out."""
        return await self._post(self.dialect.path, body, headers)

    async def openai(
        self, path: StreamPath, body: Json, *, headers: Headers | None = None, server: str | None = None
    ) -> Any:
        """Make an OpenAI request; for `"stream": true` use `stream`. `server`: past the router."""
        return (await self._answer(path, body, headers, server)).content

    async def tokenize(self, text: Json) -> list[int]:
        """Tokenize {"prompt"} or {"messages"}, with options."""
        return list((await self._post("/tokenize", {"model": BASE_MODEL, **text}))["tokens"])

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return await self.dialect.detokenize(self._post, tokens)

    @asynccontextmanager
    async def stream(
        self, path: StreamPath, body: Json, *, headers: Headers | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield server-sent events as they arrive, in pieces of any length. `body` has `"stream": true`.

        Errors are raised on entering, before any event. Leaving the context early aborts the request.
        """
        async with AsyncExitStack() as stack:
            url = self.proxy_url + path
            yield await self._once_resumed(
                lambda: stack.enter_async_context(self.http.stream(url, json=body, headers=headers))
            )

    async def _post(self, path: str, body: Json, headers: Headers | None = None) -> Any:
        return (await self._answer(path, body, headers)).content

    def _server_of(self, key: str) -> str:
        """Choose a server by rendezvous hashing: when a server joins or leaves, most keys keep their server.

        D. Thaler, C. Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM ToN 6(1), 1998.
        """
        return max(self.straight, key=lambda url: hash(key + url), default=self.proxy_url)

    async def _answer(
        self,
        path: str,
        body: Json,
        headers: Headers | None = None,
        server: str | None = None,
        channel: str = "",
    ) -> HttpAnswer:
        send = partial(self.http.request, "POST", (server or self.proxy_url) + path)
        return await self._once_resumed(lambda: send(json=body, headers=headers, channel=channel))

    async def _once_resumed(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make the call, and repeat it while the server refuses it because it is paused."""
        while True:
            try:
                return await call()
            except HttpStatusError as error:
                refusal = self.dialect.refusal(error.status, error.message)
                if not isinstance(refusal, SamplerPausedError):
                    raise refusal from error
            await asyncio.sleep(PAUSED_S)
