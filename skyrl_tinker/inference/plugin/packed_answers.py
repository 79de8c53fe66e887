"""Packed answers of vLLM's generate route, without FastAPI and without a JSON object per token."""

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
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.utils.serial_utils import numpy2base64

from skyrl_tinker.inference.packed import PACKED, pack
from skyrl_tinker.inference.plugin.asgi import read_body, with_body

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
            packable = not asked.stream and asked.sampling_params.logprobs == 0
            packable &= asked.sampling_params.prompt_logprobs is None and asked.output_mode == "tokens"
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
        """Return the packed answer of vLLM's method. The only logprobs requested are those of the tokens."""
        async for output in result_generator:
            final = output
        choices = []
        for each in final.outputs:
            self._raise_if_error(each.finish_reason, request_id)
            choices.append(
                {
                    "index": each.index,
                    "finish_reason": each.finish_reason or "stop",
                    "weight_versions": [asdict(span) for span in each.weight_versions or ()],
                    "routed_experts": None
                    if each.routed_experts is None
                    else numpy2base64(each.routed_experts),
                }
            )
        scores = final.prompt_token_id_logprobs
        payload = {
            "model": model_name,
            "choices": choices,
            "usage": {"prompt_tokens_details": {"cached_tokens": final.num_cached_tokens}},
            "prompt_token_id_logprobs": None if scores is None else numpy2base64(scores),
        }
        tokens = [list(each.token_ids) for each in final.outputs]
        return pack(payload, tokens, [_of_tokens(each.logprobs) for each in final.outputs])


def _of_tokens(listed: Any) -> Any:
    """Return [length], float32, the first of each position: vLLM lists that of the sampled token there."""
    assert isinstance(listed, FlatLogprobs)
    return np.asarray(listed.logprobs, np.float32)[listed.start_indices]


def _accepts(scope: Scope) -> bool:
    return any(name == b"accept" and value == PACKED.encode() for name, value in scope["headers"])
