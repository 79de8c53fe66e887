"""vLLM's dialect."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_tinker.domain.values import SampleRequest
from skyrl_tinker.errors import NotFoundError, SamplerError, UserError
from skyrl_tinker.inference.client import vllm_requests, vllm_responses
from skyrl_tinker.inference.client.generated import SamplerResponse, diverged
from skyrl_tinker.inference.client.sampling_port import Json, Post
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.inference.packed import PACKED


@dataclass(frozen=True, slots=True)
class VllmDialect:
    path: str = "/inference/v1/generate"

    @property
    def trial(self) -> Json:
        return {"model": BASE_MODEL, **vllm_responses.TRIAL}

    def body(
        self,
        model: str,
        request: SampleRequest,
        *,
        eos: Sequence[int],
        context: int,
        attempt: str,
        priority: int,
    ) -> dict[str, Any]:
        body = vllm_requests.body(model, request, eos=eos, context=context)
        return body | {"request_id": attempt, "priority": priority}

    def headers(self, request: SampleRequest, attempt: str, *, straight: bool) -> dict[str, str]:
        # vLLM prefers the header, which a router may set.
        headers = {"X-Request-Id": attempt}
        if straight and not vllm_requests.lists_logprobs(request):
            headers["Accept"] = PACKED  # servers of others answer JSON
        return headers

    def parse(
        self, answer: Json, request: SampleRequest, *, switched: bool, replica: str | None
    ) -> SamplerResponse:
        return vllm_responses.parse(answer, request, switched=switched, replica=replica)

    def refusal(self, status: int, message: str) -> UserError | SamplerError:
        if status == 404:
            return NotFoundError(message)
        if "not JSON compliant" in message:  # vLLM's words for NaN in its answer
            return diverged()
        if status in (400, 422):
            return UserError(message)
        return SamplerError(f"the sampler answered {status}: {message}")

    def logprobs_mode(self, answer: Json) -> Literal["raw", "processed"] | None:
        return vllm_responses.logprobs_mode(answer)

    def lists_experts(self, answer: Json) -> bool:
        return vllm_responses.lists_experts(answer)

    async def tokenize(self, post: Post, text: Json) -> list[int]:
        return list((await post("/tokenize", {"model": BASE_MODEL, **text}))["tokens"])

    async def detokenize(self, post: Post, tokens: Sequence[int]) -> str:
        return str((await post("/detokenize", {"model": BASE_MODEL, "tokens": tokens}))["prompt"])


VLLM = VllmDialect()
