"""Samples over a WebSocket, packed: without HTTP, without FastAPI, without an object per token or logprob."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from copy import copy
from dataclasses import asdict
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.entrypoints.serve.exception_handling.handlers.vllm_error import vllm_error_handler
from vllm.exceptions import VLLMError
from vllm.inputs import TokensInput, tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.renderers.online_renderer import OnlineRenderer

from skyrl_tinker.inference.constants import SESSION
from skyrl_tinker.inference.packed import OTHERWISE, PROTOCOL, Outgoing, asked, pack, parts_of, tell

PATH = "/inference/v1/generate"
_UNFORESEEN = b'{"error": {"message": "Internal server error"}}'  # vLLM's words
_log = logging.getLogger(__name__)


class PackedAnswers:
    """ASGI middleware, after the guard, for WebSockets to the route of samples (inference/packed.py)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "websocket" and scope["path"] == PATH and PROTOCOL in scope["subprotocols"]
        if not ours or any(name == b"origin" for name, _ in scope["headers"]):  # of a browser's page
            await self._app(scope, receive, send)  # which refuses WebSockets
            return
        samples = _Samples(scope["app"], send)
        await receive()  # the wish to connect
        await send({"type": "websocket.accept", "subprotocol": PROTOCOL})
        try:
            while (message := await receive())["type"] == "websocket.receive":
                for part in parts_of(message.get("bytes") or b""):
                    samples.take(part)
        finally:
            samples.abort()


class _Samples:
    """Samples of one client; they end with its connection."""

    def __init__(self, app: Any, send: Send) -> None:
        self._app = app
        self._serving = copy(app.state.serving_tokens)
        self._serving.__class__ = _PackedTokens
        self._serving.online_renderer = _Renderer(self._serving.online_renderer)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outgoing = Outgoing()
        self._writer = asyncio.create_task(self._write(send))

    def take(self, part: bytes) -> None:
        """Begin a sample, or abort it."""
        request_id, session_key, content = asked(part)
        if content:
            task = asyncio.create_task(self._answer(request_id, session_key, content))
            self._tasks[request_id] = task
            task.add_done_callback(lambda _: self._forget(request_id, task))
        elif request_id in self._tasks:
            self._tasks[request_id].cancel()

    def abort(self) -> None:
        for task in (self._writer, *self._tasks.values()):
            task.cancel()

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is task:  # the client may have made the request again
            del self._tasks[request_id]

    async def _answer(self, request_id: str, session_key: str, content: bytes) -> None:
        header = SESSION.lower().encode(), session_key.encode()
        request = Request({"type": "http", "app": self._app, "headers": [header], "state": {}})
        try:
            answer = tell(request_id, *await self._generate_or_refuse(content, request))
        except Exception:  # of the refusal: without an answer its client would wait for ever
            _log.exception("a sample could not be answered")
            answer = tell(request_id, 500, _UNFORESEEN)
        self._outgoing.put(answer)

    async def _write(self, send: Send) -> None:
        """Write one message after another, so that the server's ping comes between them."""
        while True:
            message = await self._outgoing.message()
            with suppress(OSError, RuntimeError):  # the client has gone, or the connection is being closed
                await send({"type": "websocket.send", "bytes": message})

    async def _generate_or_refuse(self, content: bytes, request: Request) -> tuple[int, bytes]:
        """Have vLLM's own handlers say the errors of a request, as they do by HTTP."""
        try:
            return await self._generate(content, request)
        except VLLMError as error:
            refusal = await vllm_error_handler(request, error)
        except Exception as error:
            refusal = await exception_handler(request, error)
            if refusal.status_code >= 500:  # no fault of the request
                _log.exception("a sample failed")
        return refusal.status_code, bytes(refusal.body)

    async def _generate(self, content: bytes, request: Request) -> tuple[int, bytes]:
        try:
            wanted = GenerateRequest.model_validate_json(content)
        except ValueError:
            return OTHERWISE, b""  # vLLM's own route names the field
        params = wanted.sampling_params
        packable = not wanted.stream and wanted.output_mode == "tokens" and params.logprobs is not None
        if not packable or -1 in (params.logprobs, params.prompt_logprobs):  # the vocabulary's length
            return OTHERWISE, b""
        params.flat_logprobs = params.skip_clone = True
        answer = await self._serving.serve_tokens(wanted, request)
        if isinstance(answer, ErrorResponse):
            return answer.error.code, answer.model_dump_json().encode()
        return 200, answer


class _PackedTokens(ServingTokens):
    async def serve_tokens_full_generator(  # type: ignore[override]
        self,
        request: GenerateRequest,
        result_generator: AsyncGenerator[RequestOutput, None],
        request_id: str,
        model_name: str,
        request_metadata: Any,
        **_: Any,  # of 0.33, for other forms of answers
    ) -> bytes:
        """Return the packed answer of vLLM's method."""
        async for output in result_generator:
            final = output
        params, choices = request.sampling_params, []
        for each in final.outputs:
            self._raise_if_error(each.finish_reason, request_id)
            tokens = np.asarray(each.token_ids, np.int32)
            listed = _listed(each.logprobs, params.logprobs or 0)
            if len(listed["logprobs"]) != len(tokens):
                raise RuntimeError(f"found logprobs of {len(listed['logprobs'])} of {len(tokens)} tokens")
            choices.append(
                {
                    "index": each.index,
                    "token_ids": tokens,
                    "logprobs": listed,
                    "finish_reason": each.finish_reason or "stop",
                    "weight_versions": [asdict(span) for span in each.weight_versions or ()],
                    "routed_experts": each.routed_experts,
                }
            )
        k = params.prompt_logprobs
        return pack(
            {
                "model": model_name,
                "choices": choices,
                "usage": {"prompt_tokens_details": {"cached_tokens": final.num_cached_tokens}},
                "prompt_logprobs": None if k is None else _listed(final.prompt_logprobs, k),
                "prompt_token_id_logprobs": final.prompt_token_id_logprobs,
            }
        )


class _Renderer:
    """Renderer of prompts that are tokens already: vLLM's own takes a twelfth of its server's time for them.

    The engine itself checks their number and that each is in the vocabulary.
    """

    def __init__(self, stock: OnlineRenderer) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    async def preprocess_completion(
        self, request: GenerateRequest, *, prompt_input: list[int], **_: Any
    ) -> list[TokensInput]:
        return [tokens_input(prompt_input, cache_salt=request.cache_salt)]


def _listed(positions: Any, k: int) -> dict[str, Any]:
    """Return logprobs [positions, 1 + k], each position's own token first, and its `likeliest` tokens.

    The first position of a prompt has none, and no row.
    """
    assert isinstance(positions, FlatLogprobs)
    if len(positions.logprobs) % (1 + k):
        raise RuntimeError(f"found {len(positions.logprobs)} logprobs, expected {1 + k} of each position")
    return {
        "likeliest": np.asarray(positions.token_ids, np.int32).reshape(-1, 1 + k)[:, 1:],
        "logprobs": np.asarray(positions.logprobs, np.float32).reshape(-1, 1 + k),
    }
