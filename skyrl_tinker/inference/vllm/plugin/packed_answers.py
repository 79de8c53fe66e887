"""Packed answers of vLLM's generate route, without FastAPI and without an object per token or logprob."""

from collections.abc import AsyncGenerator
from copy import copy
from dataclasses import asdict
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.entrypoints.serve.exception_handling.handlers.vllm_error import vllm_error_handler
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.exceptions import VLLMError
from vllm.inputs import TokensInput, tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.renderers.online_renderer import OnlineRenderer

from skyrl_tinker.inference.packed import PACKED, pack
from skyrl_tinker.inference.vllm.plugin.middlewares import read_body, with_body

PATH = "/inference/v1/generate"


class PackedAnswers:
    """ASGI middleware, after the guard, that answers requests for samples which accept PACKED."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or not _accepts(scope):
            await self._app(scope, receive, send)
            return
        content = await read_body(receive)
        try:
            asked = GenerateRequest.model_validate_json(content)
            params = asked.sampling_params
            packable = not asked.stream and asked.output_mode == "tokens" and params.logprobs is not None
            packable &= -1 not in (params.logprobs, params.prompt_logprobs)  # the vocabulary's length
        except ValueError:  # vLLM's own route names the field
            packable = False
        if not packable:
            await self._app(*with_body(scope, receive, content), send)
            return
        request = Request(scope, receive)
        try:
            answer = await _generate(asked, request)
        except VLLMError as error:
            answer = await vllm_error_handler(request, error)
        except (ValueError, TypeError, OverflowError, NotImplementedError) as error:  # as vLLM's routes do
            answer = await exception_handler(request, error)
        if answer is not None:
            await answer(scope, receive, send)


@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def _generate(asked: GenerateRequest, raw_request: Request) -> Response:
    """Return the answer; None once the client has gone."""
    serving = copy(raw_request.app.state.serving_tokens)
    serving.__class__ = _PackedTokens
    serving.online_renderer = _Renderer(serving.online_renderer)
    asked.sampling_params.flat_logprobs = True
    answer = await serving.serve_tokens(asked, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), answer.error.code)
    return Response(answer, media_type=PACKED)


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


def _accepts(scope: Scope) -> bool:
    return any(name == b"accept" and value == PACKED.encode() for name, value in scope["headers"])
