"""The data plane: what any replica may serve."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from skyrl_tinker.domain.values import SampleOutput, SampleRequest
from skyrl_tinker.errors import NotFoundError, SamplerError, UserError
from skyrl_tinker.inference.client import resume, vllm_requests, vllm_responses
from skyrl_tinker.inference.client.http_connection import HttpStatusError, JsonHttp
from skyrl_tinker.inference.client.in_flight import InFlight
from skyrl_tinker.inference.client.vllm_responses import GeneratedSequence, VllmResponse
from skyrl_tinker.inference.constants import BASE_MODEL

ABORT_PAUSE_S = 0.05
"""Between tries of a sequence that is aborted again and again while samplers are paused."""

Json = Mapping[str, Any]
Headers = Mapping[str, str]
StreamPath = Literal["/inference/v1/generate", "/v1/completions", "/v1/chat/completions"]

ModelSource = Callable[[], AbstractAsyncContextManager[str]]
"""Entered around every HTTP request: yields the name to sample from, which stays loaded until it is left. So
a sequence that was aborted goes on under what the source yields then."""


def fixed(name: str) -> ModelSource:
    """The base model (`spec.BASE_MODEL`) or an adapter that somebody else keeps loaded."""
    return lambda: nullcontext(name)


@dataclass
class DataPlane:
    """`proxy_url`: the router, or the server itself when there is one only.

    Bodies and answers of all methods but `sample` are those of vLLM's HTTP API. NotFoundError: no such model;
    UserError: vLLM refused the request; SamplerError: it could not be served.
    """

    proxy_url: str
    _http: JsonHttp = field(default_factory=JsonHttp, repr=False, compare=False, kw_only=True)
    _running: InFlight = field(default_factory=InFlight, repr=False, compare=False, kw_only=True)

    async def generate(self, body: Json, *, headers: Headers | None = None) -> Any:
        """Token ids in and out."""
        return await self._ask("/inference/v1/generate", body, headers)

    async def completion(self, body: Json, *, headers: Headers | None = None) -> Any:
        """OpenAI's; for `"stream": true` use `stream`."""
        return await self._ask("/v1/completions", body, headers)

    async def chat_completion(self, body: Json, *, headers: Headers | None = None) -> Any:
        """OpenAI's; for `"stream": true` use `stream`."""
        return await self._ask("/v1/chat/completions", body, headers)

    async def render(self, body: Json) -> list[dict[str, Any]]:
        """What `generate` would be sent for a completion (one per prompt) or chat completion (one)."""
        if "messages" in body:
            return [await self._ask("/v1/chat/completions/render", body)]
        return list(await self._ask("/v1/completions/render", body))

    async def tokenize(self, body: Json) -> Any:
        """{"model", "prompt"} or {"model", "messages"} -> {"tokens", "count", "max_model_len"}"""
        return await self._ask("/tokenize", body)

    async def detokenize(self, body: Json) -> Any:
        """{"model", "tokens"} -> {"prompt"}"""
        return await self._ask("/detokenize", body)

    @asynccontextmanager
    async def stream(
        self, path: StreamPath, body: Json, *, headers: Headers | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Server-sent events as vLLM writes them, in pieces of any length. `body` has `"stream": true`.

        Raises on entering, before anything was yielded. Leaving it early aborts the request.
        """
        try:
            async with self._http.stream(self.proxy_url + path, json=body, headers=headers) as chunks:
                yield chunks
        except HttpStatusError as error:
            raise _refusal(error) from error

    async def _ask(self, path: str, body: Json, headers: Headers | None = None) -> Any:
        try:
            return await self._http.request("POST", self.proxy_url + path, json=body, headers=headers)
        except HttpStatusError as error:
            raise _refusal(error) from error

    async def sample(
        self,
        model: ModelSource,
        request: SampleRequest,
        *,
        session_key: str,
        eos: tuple[int, ...],
        context: int,
        tag: str | None = None,
    ) -> SampleOutput:
        """Sample from what `model` yields; ControlPlane.abort(tag) makes it yield anew in the middle.

        `eos` ends sequences unless request.params.stop is (); `context` bounds max_tokens None. Sequences
        that were aborted are completed (inference.resume). NotFoundError: no such adapter (load it again);
        UserError: vLLM refused the request; SamplerError: it could not be served.
        """
        call = _SampleCall(self, model, session_key, eos, context, tag)
        parts = vllm_requests.split(request)
        answered = await asyncio.gather(*(call.generate(part) for part in parts))
        sequences = await asyncio.gather(
            *(
                call.complete(part, index, generated, switched)
                for part, (answer, switched) in zip(parts, answered, strict=True)
                for index, generated in enumerate(answer.sequences)
            )
        )
        return vllm_responses.output(request, [answer for answer, _ in answered], sequences)


@dataclass(frozen=True, slots=True)
class _SampleCall:
    """What stays the same over the requests that one sample call makes."""

    plane: DataPlane
    model: ModelSource
    session_key: str
    eos: tuple[int, ...]
    context: int
    tag: str | None

    async def generate(self, request: SampleRequest) -> tuple[VllmResponse, bool]:
        """One request, and whether its policy was switched meanwhile.

        It is sent again as a whole when it was aborted before its prompt was scored.
        """
        while True:
            answer, switched = await self._once(request)
            if answer.scored:
                return answer, switched
            await asyncio.sleep(ABORT_PAUSE_S)

    async def complete(
        self, request: SampleRequest, index: int, generated: GeneratedSequence, switched: bool
    ) -> GeneratedSequence:
        """Resubmit what is left of an aborted sequence until it ends by itself."""
        while generated.finish == "abort":
            await asyncio.sleep(ABORT_PAUSE_S)
            kept = await resume.kept(request, generated, switched=switched, text_of=self._text_of)
            rest = resume.remainder(request, index, kept, context=self.context)
            if rest is None:
                return replace(kept, finish="length")
            answer, switched = await self.generate(rest)
            generated = kept.then(answer.sequences[0])
        return generated

    async def _once(self, request: SampleRequest) -> tuple[VllmResponse, bool]:
        async with self.model() as name:
            body = vllm_requests.body(name, request, eos=self.eos, context=self.context)
            with self.plane._running.attempt(self.tag) as attempt:
                # vLLM prefers the header, which a router may set.
                headers = {"X-Session-ID": self.session_key, "X-Request-Id": attempt.id}
                payload = await self.plane.generate({**body, "request_id": attempt.id}, headers=headers)
            return vllm_responses.parse(payload, request), attempt.switched

    async def _text_of(self, tokens: tuple[int, ...]) -> str:
        return str((await self.plane.detokenize({"model": BASE_MODEL, "tokens": tokens}))["prompt"])


def _refusal(error: HttpStatusError) -> UserError | SamplerError:
    if error.status == 404:
        return NotFoundError(error.message)
    if "not JSON compliant" in error.message:  # vLLM's words for NaN in its answer
        return vllm_responses.diverged()
    if error.status in (400, 422):
        return UserError(error.message)
    return SamplerError(f"the sampler answered {error}")
