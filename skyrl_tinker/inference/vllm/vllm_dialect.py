"""vLLM behind the port: its dialect and its control plane."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_tinker.domain.samples import SampleRequest
from skyrl_tinker.errors import (
    NotFoundError,
    RequestGivenUpError,
    SamplerError,
    SamplerPausedError,
    UserError,
)
from skyrl_tinker.inference.client.fan_out import FanOut, RefusedError, UnreachableError, common
from skyrl_tinker.inference.client.generated import SamplerResponse, diverged, refused
from skyrl_tinker.inference.client.sampling_port import Advice, AnswerReader, Json, PauseMode, Post
from skyrl_tinker.inference.constants import BASE_MODEL, MAX_SEQUENCES, PROBE
from skyrl_tinker.inference.vllm import vllm_requests, vllm_responses
from skyrl_tinker.inference.vllm.vllm_arguments import VERSION_PULL

BLOCKS_IN_TRANSFER = "Failed to reset KV cache"
"""Words of the error that vLLM raises while a decode server has not fetched all blocks of a prompt."""
RESET_POLL_S = 0.02


@dataclass
class VllmControl(FanOut):
    load_route, has_loaded = "/v1/load_lora_adapter", "already been loaded"

    async def world_sizes(self) -> tuple[int, ...]:
        answers = await self._call_all("GET", "/get_world_size", params={"include_dp": "true"})
        return tuple(int(answer["world_size"]) for answer in answers)

    async def require_arguments(self, *, keeps_cache: bool) -> None:
        """Do nothing: the plugin has checked its server at the start, and the trial shows the rest."""

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        params = {"mode": mode, "clear_cache": "true"} if clear_cache else {"mode": mode, "level": "0"}
        route = "/pause" if clear_cache else "/sleep"  # the same, without 20 ms for answers in progress
        await self._all_or_none(
            lambda url: self._call(url, "POST", route, params=params, long=mode == "wait"), undo=self._resume
        )

    async def resume(self) -> None:
        await self._each(self._resume)

    async def _resume(self, url: str) -> None:
        await self._call(url, "POST", "/wake_up", params={"tags": "scheduling"})

    async def is_paused(self) -> bool:
        return common([bool(answer["is_paused"]) for answer in await self._call_all("GET", "/is_paused")])

    async def _abort(self, url: str, attempts: list[str]) -> None:
        ids = [f"generate-tokens-{attempt}" for attempt in attempts]  # each with all of its n sequences
        try:
            await self._call(url, "POST", "/inference/v1/abort_requests", {"request_ids": ids})
        except UnreachableError:  # its requests have ended with it
            return

    async def sleep(self, level: int = 1, mode: PauseMode = "keep") -> None:
        params = {"level": str(level), "mode": mode}
        await self._all_or_none(
            lambda url: self._call(url, "POST", "/sleep", params=params, long=True),
            undo=lambda url: self._call(url, "POST", "/wake_up", long=True),
        )

    async def wake_up(self, tags: Sequence[Literal["weights", "kv_cache"]] = ()) -> None:
        await self._call_all("POST", "/wake_up", params=[("tags", tag) for tag in tags], long=True)

    async def is_sleeping(self) -> bool:
        return common([bool(answer["is_sleeping"]) for answer in await self._call_all("GET", "/is_sleeping")])

    async def reset_prefix_cache(self) -> None:
        await self._each(self._reset_prefix_cache)

    async def init_weight_transfer_engine(self, info: Mapping[str, Any]) -> None:
        await self._tell("/init_weight_transfer_engine", info, "init_info")

    async def shutdown_weight_transfer_engine(self) -> None:
        await self._call_all("POST", "/shutdown_weight_transfer_engine", long=True)

    async def start_weight_update(self) -> None:
        await self._call_all("POST", "/start_weight_update", repeatable=False, long=True)

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        await self._tell("/update_weights", info, "update_info")

    async def finish_weight_update(self, version: str) -> None:
        await self._call_all(
            "POST", "/finish_weight_update", {"weight_version": version}, repeatable=False, long=True
        )

    async def weight_version(self) -> str:
        answers = await self._call_all("GET", "/weight_info")
        return common([str(answer["weight_version"]) for answer in answers])

    async def set_weight_version(self, version: str) -> None:
        await self._call_all("POST", "/update_weight_version", {"new_version": version})

    async def _reset_prefix_cache(self, url: str) -> None:
        """Try until no block is in transfer to host memory or to a decode server."""
        deadline = time.monotonic() + self.patience_s
        while not await self._try_reset(url):
            if time.monotonic() > deadline:
                raise SamplerError(f"{url} could not reset its prefix cache within {self.patience_s:g} s")
            await asyncio.sleep(RESET_POLL_S)

    async def _try_reset(self, url: str) -> bool:
        params = {"reset_running_requests": "true", "reset_external": "true"}
        try:
            answer = await self._call(url, "POST", "/reset_prefix_cache", params=params)
        except RefusedError as error:
            if BLOCKS_IN_TRANSFER not in error.answer.message:
                raise
            return False
        return bool(answer["success"])

    async def _unload(self, url: str, name: str) -> None:
        try:
            await self._call(url, "POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except RefusedError as error:
            if error.answer.status not in (400, 404):  # not loaded
                raise


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
