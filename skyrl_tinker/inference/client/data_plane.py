"""The data plane: requests that any replica may serve."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from skyrl_tinker.domain.values import SampleRequest
from skyrl_tinker.errors import NotFoundError, SamplerError, UserError
from skyrl_tinker.inference.client import vllm_requests, vllm_responses
from skyrl_tinker.inference.client.http_connection import HttpAnswer, HttpStatusError, JsonHttp
from skyrl_tinker.inference.client.in_flight import InFlight
from skyrl_tinker.inference.client.vllm_responses import VllmResponse
from skyrl_tinker.inference.constants import MAX_SEQUENCES, REPLICA
from skyrl_tinker.inference.packed import PACKED

MOST_LISTED = 4096
"""Tokens of a prompt's top k that are parsed on the event loop; for more, others would wait."""
Json = Mapping[str, Any]
Headers = Mapping[str, str]
StreamPath = Literal["/inference/v1/generate", "/v1/completions", "/v1/chat/completions"]


@dataclass
class DataPlane:
    """`proxy_url`: the router, or the server itself when there is one only.

    `straight`: the servers to which samples go without a router, each key to one of them.
    Bodies and answers of all methods but `sample` are those of vLLM's HTTP API. NotFoundError: no such model;
    UserError: vLLM refused the request; SamplerError: it could not be served.
    """

    proxy_url: str
    straight: tuple[str, ...] = ()
    http: JsonHttp = field(default_factory=JsonHttp)
    in_flight: InFlight = field(default_factory=InFlight)
    most_sequences: int = MAX_SEQUENCES
    """Sequences of one request to vLLM."""

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
    ) -> VllmResponse:
        """Make one vLLM request, for at most `most_sequences` samples (vllm_requests.split).

        `eos` ends sequences unless request.params.stop is (); `context` bounds max_tokens None. The lowest
        `priority` goes first (Priorities). `fields`: others of vLLM's request. Sequences come back as `abort`
        when samplers are paused, or ControlPlane.abort(tag) is called, in the middle; those that are
        `interruptible` also when ControlPlane.interrupt(model) is.
        NotFoundError: no such adapter (load it again).
        """
        body = vllm_requests.body(model, request, eos=eos, context=context)
        with self.in_flight.attempt(tag, model if interruptible else None) as attempt:
            body |= {"request_id": attempt.id, "priority": priority, **fields}
            # vLLM prefers the header, which a router may set.
            headers = {"X-Session-ID": session_key, "X-Request-Id": attempt.id}
            if self.straight and not vllm_requests.lists_logprobs(request):
                headers["Accept"] = PACKED  # servers of others answer JSON
            answer = await self._answer("/inference/v1/generate", body, headers, self._server_of(session_key))
        replica, switched = answer.headers.get(REPLICA), attempt.switched
        parse = partial(vllm_responses.parse, answer.content, request, switched=switched, replica=replica)
        if request.routed_experts or request.topk_prompt_logprobs * len(request.prompt) > MOST_LISTED:
            return await asyncio.to_thread(parse)
        return parse()

    async def generate(self, body: Json, *, headers: Headers | None = None) -> Any:
        """Generate with token ids in and out."""
        return await self._post("/inference/v1/generate", body, headers)

    async def completion(self, body: Json, *, headers: Headers | None = None) -> Any:
        """Make an OpenAI request; for `"stream": true` use `stream`."""
        return await self._post("/v1/completions", body, headers)

    async def chat_completion(self, body: Json, *, headers: Headers | None = None) -> Any:
        """Make an OpenAI request; for `"stream": true` use `stream`."""
        return await self._post("/v1/chat/completions", body, headers)

    async def render(self, body: Json) -> list[dict[str, Any]]:
        """Return bodies of `generate` for a completion (one per prompt) or chat completion (one)."""
        if "messages" in body:
            return [await self._post("/v1/chat/completions/render", body)]
        return list(await self._post("/v1/completions/render", body))

    async def tokenize(self, body: Json) -> Any:
        """Turn {"model", "prompt"} or {"model", "messages"} into {"tokens", "count", "max_model_len"}."""
        return await self._post("/tokenize", body)

    async def detokenize(self, body: Json) -> Any:
        """Turn {"model", "tokens"} into {"prompt"}."""
        return await self._post("/detokenize", body)

    @asynccontextmanager
    async def stream(
        self, path: StreamPath, body: Json, *, headers: Headers | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield server-sent events as vLLM writes them, in pieces of any length. `body` has `"stream": true`.

        Raises on entering, before anything was yielded. Leaving it early aborts the request.
        """
        try:
            async with self.http.stream(self.proxy_url + path, json=body, headers=headers) as chunks:
                yield chunks
        except HttpStatusError as error:
            raise refusal(error.status, error.message) from error

    async def _post(self, path: str, body: Json, headers: Headers | None = None) -> Any:
        return (await self._answer(path, body, headers)).content

    def _server_of(self, key: str) -> str:
        """Choose a server by rendezvous hashing: when another one comes or goes, most keys keep theirs.

        D. Thaler, C. Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM ToN 6(1), 1998.
        """
        return max(self.straight, key=lambda url: hash(key + url), default=self.proxy_url)

    async def _answer(
        self, path: str, body: Json, headers: Headers | None = None, server: str | None = None
    ) -> HttpAnswer:
        try:
            url = (server or self.proxy_url) + path
            return await self.http.request("POST", url, json=body, headers=headers)
        except HttpStatusError as error:
            raise refusal(error.status, error.message) from error


def refusal(status: int, message: str) -> UserError | SamplerError:
    """Return the error that an error status of vLLM means."""
    if status == 404:
        return NotFoundError(message)
    if "not JSON compliant" in message:  # vLLM's words for NaN in its answer
        return vllm_responses.diverged()
    if status in (400, 422):
        return UserError(message)
    return SamplerError(f"the sampler answered {status}: {message}")
