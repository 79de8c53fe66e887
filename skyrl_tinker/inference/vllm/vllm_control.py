"""vLLM's control plane."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.fan_out import FanOut, RefusedError, UnreachableError, common
from skyrl_tinker.inference.client.sampling_port import PauseMode
from skyrl_tinker.inference.vllm.vllm_requests import abort_id

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
        ids = [abort_id(attempt) for attempt in attempts]
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
