"""vLLM behind the port."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_tinker.domain.samples import SampleRequest
from skyrl_tinker.errors import (
    NotFoundError,
    RequestGivenUpError,
    SamplerError,
    SamplerPausedError,
    UserError,
)
from skyrl_tinker.inference.client.generated import SamplerResponse, diverged, refused
from skyrl_tinker.inference.client.sampling_port import Advice, AnswerReader, Json, Post
from skyrl_tinker.inference.constants import BASE_MODEL, MAX_SEQUENCES, PROBE
from skyrl_tinker.inference.vllm import vllm_requests, vllm_responses
from skyrl_tinker.inference.vllm.vllm_arguments import VERSION_PULL
from skyrl_tinker.inference.vllm.vllm_control import VllmControl


@dataclass(frozen=True)
class VllmDialect:
    path = "/inference/v1/generate"
    channels = True  # of servers with our plugin
    most_sequences = MAX_SEQUENCES
    core_path = "/is_sleeping"
    metrics_prefix = "vllm:"
    unbounded_metrics = frozenset({"vllm:lora_requests_info"})
    pull_probe = PROBE
    advice = Advice(
        routes=f"VLLM_SERVER_DEV_MODE=1, --enable-scale-out and --served-model-name {BASE_MODEL}",
        pull=f"with --middleware {VERSION_PULL}",
        context="--max-model-len {}",
        logprobs="--logprobs-mode {}_logprobs",
        experts="--enable-return-routed-experts",
    )
    trial = vllm_responses.TRIAL
    body = staticmethod(vllm_requests.body)
    logprobs_mode = staticmethod(vllm_responses.logprobs_mode)
    lists_experts = staticmethod(vllm_responses.lists_experts)
    control = VllmControl

    def call(
        self, request: SampleRequest, attempt: str, priority: int
    ) -> tuple[dict[str, Any], dict[str, str]]:
        # vLLM prefers the header, which a router may set.
        return {"request_id": attempt, "priority": priority}, {"X-Request-Id": attempt}

    def parse(
        self, payload: Json, request: SampleRequest, *, model: str, switched: bool, replica: str | None
    ) -> SamplerResponse:
        return vllm_responses.parse(
            payload, request, switched=switched, replica=replica
        )  # the answer names the model

    def openai_body(self, given: Json, model: str, priority: int) -> dict[str, Any]:
        return {**given, "model": model, "priority": priority, "ignore_eos": True}

    def openai_reader(self, request: Json) -> AnswerReader:
        return vllm_responses.with_both_reasonings

    def refusal(self, status: int, message: str) -> UserError | SamplerError:
        if status == 404:
            return NotFoundError(message)
        if "not JSON compliant" in message:  # vLLM's words for NaN in its answer
            return diverged()
        if status == 503 and "Generation is paused" in message:  # vLLM 0.32 has such a request wait itself
            return SamplerPausedError("the sampler is paused")
        if status == 500 and message == "Internal server error":  # vLLM's words for the finish reason "error"
            return RequestGivenUpError("the sampler gave the request up")
        return refused(status, message)

    async def detokenize(self, post: Post, tokens: Sequence[int]) -> str:
        return str((await post("/detokenize", {"model": BASE_MODEL, "tokens": tokens}))["prompt"])


VLLM = VllmDialect()
