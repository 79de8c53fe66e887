"""SGLang's control plane."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.fan_out import FanOut, RefusedError, UnreachableError, common
from skyrl_tinker.inference.client.sampling_port import PauseMode
from skyrl_tinker.inference.sglang.sglang_process import VERSION

IDLE_POLL_S = 0.05
ARGUMENTS = {
    "version": VERSION,
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "enable_cache_report": True,
    "disable_priority_preemption": True,
}
"""As GET /server_info tells them: those without which it samples, but not as this server counts on."""


@dataclass
class SglangControl(FanOut):
    load_route, has_loaded = "/load_lora_adapter", "already loaded"

    async def world_sizes(self) -> tuple[int, ...]:
        answers = await self._call_all("GET", "/server_info")
        return tuple(int(answer["tp_size"]) for answer in answers)

    async def require_arguments(self, *, keeps_cache: bool) -> None:
        kept = {"disable_overlap_schedule": True} if keeps_cache else {}
        for info in await self._call_all("GET", "/server_info"):
            of_cpu = {"prefill_max_requests": 1} if info.get("lora_backend") == "torch_native" else {}
            for name, value in (ARGUMENTS | of_cpu | kept).items():
                if (found := info.get(name)) != value:  # a server of another engine lacks all of them
                    raise SamplerError(f"{name}: found {found}, expected {value}")

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        """Pause as the port says; requests that arrive meanwhile wait before the engine.

        Paused requests keep their keys and values only if `clear_cache` is False; else they are retracted.
        """
        await self._all_or_none(lambda url: self._pause(url, mode, clear_cache), undo=self._continue)

    async def _pause(self, url: str, mode: PauseMode, clear_cache: bool) -> None:
        if mode == "wait":
            while await self._busy(url):  # noqa: ASYNC110 - it is another process that changes
                await asyncio.sleep(IDLE_POLL_S)
        retracted = "retract" if clear_cache or mode == "wait" else "in_place"
        how = "abort" if mode == "abort" else retracted
        await self._call(url, "POST", "/pause_generation", {"mode": how}, long=True)
        if clear_cache:
            await self._call(url, "POST", "/flush_cache")

    async def _busy(self, url: str) -> bool:
        loads = (await self._call(url, "GET", "/v1/loads"))["loads"]
        return sum(int(load["num_running_reqs"] + load["num_waiting_reqs"]) for load in loads) > 0

    async def _continue(self, url: str) -> None:
        await self._call(url, "POST", "/continue_generation", {"torch_empty_cache": False})

    async def resume(self) -> None:
        await self._each(self._continue)

    async def is_paused(self) -> bool:
        return common([bool(paused) for paused in (await self._each(self._is_paused)).values()])

    async def _is_paused(self, url: str) -> bool:
        try:
            await self._call(url, "GET", "/ready")
        except RefusedError as error:
            if error.answer.status == 503:
                return True
            raise
        return False

    async def _abort(self, url: str, attempts: list[str]) -> None:
        try:
            await asyncio.gather(
                *(self._call(url, "POST", "/abort_request", {"rid": attempt}) for attempt in attempts)
            )
        except UnreachableError:  # its requests have ended with it
            return

    async def sleep(self, level: int = 1, mode: PauseMode = "keep") -> None:
        raise SamplerError("SGLang's servers do not sleep here")

    async def wake_up(self, tags: Sequence[Literal["weights", "kv_cache"]] = ()) -> None:
        raise SamplerError("SGLang's servers do not sleep here")

    async def is_sleeping(self) -> bool:
        return False

    async def reset_prefix_cache(self) -> None:
        """Empty the cache; running requests are retracted, and computed again."""
        await self._each(self._reset)

    async def _reset(self, url: str) -> None:
        was_paused = await self._is_paused(url)
        await self._pause(url, "keep", clear_cache=True)
        if not was_paused:
            await self._continue(url)

    async def _unload(self, url: str, name: str) -> None:
        try:
            await self._call(url, "POST", "/unload_lora_adapter", {"lora_name": name})
        except RefusedError as error:
            if "does not exist" not in error.answer.message:
                raise

    async def init_weight_transfer_engine(self, info: Mapping[str, Any]) -> None:
        await self._tell("/init_weights_update_group", info)

    async def shutdown_weight_transfer_engine(self) -> None:
        await self._each(self._leave_group)

    async def _leave_group(self, url: str) -> None:
        try:
            await self._call(url, "POST", "/destroy_weights_update_group", {}, long=True)
        except RefusedError as error:
            if "does not exist" not in error.answer.message:
                raise

    async def start_weight_update(self) -> None:
        await self._call_all("POST", "/begin_weight_update", {}, repeatable=False, long=True)

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        await self._tell("/update_weights_from_distributed", info)

    async def finish_weight_update(self, version: str) -> None:
        await self._call_all("POST", "/end_weight_update", {}, repeatable=False, long=True)
        await self.set_weight_version(version)

    async def weight_version(self) -> str:
        return common([str(info["weight_version"]) for info in await self._call_all("GET", "/model_info")])

    async def set_weight_version(self, version: str) -> None:
        named = {"new_version": version, "abort_all_requests": False}
        await self._call_all("POST", "/update_weight_version", named)
