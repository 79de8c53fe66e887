"""The control plane: what must reach every replica at once, never through the router."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.http import HttpStatusError, JsonHttp

PauseMode = Literal["abort", "wait", "keep"]


@dataclass
class ControlPlane:
    """`server_urls` are all replicas. A call that one of them cannot do raises SamplerError."""

    server_urls: tuple[str, ...]
    _http: JsonHttp = field(default_factory=JsonHttp, repr=False, compare=False, kw_only=True)

    async def load_adapter(self, name: str, path: str) -> None:
        """On every replica or none. A name stands for one version only, so a second load is harmless."""
        try:
            await self._every(
                "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, _loaded
            )
        except SamplerError:
            await asyncio.gather(
                *(self._unload(url, name) for url in self.server_urls), return_exceptions=True
            )
            raise

    async def unload_adapter(self, name: str) -> None:
        """Harmless where it is not loaded."""
        await self._gather(self._unload(url, name) for url in self.server_urls)

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        """abort: running sequences end as aborted; wait: they finish first; keep: they stand still.

        clear_cache False keeps KV entries of the old weights: only right when weights do not change.
        """
        params = {"mode": mode, "clear_cache": "true" if clear_cache else "false"}
        await self._every("POST", "/pause", params=params)

    async def resume(self) -> None:
        await self._every("POST", "/resume")

    async def reset_prefix_cache(self) -> None:
        await self._every("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})

    async def init_weight_transfer_engine(self, info: Mapping[str, Any]) -> None:
        await self._every("POST", "/init_weight_transfer_engine", {"init_info": dict(info)})

    async def start_weight_update(self) -> None:
        await self._every("POST", "/start_weight_update", repeatable=False)

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        await self._every("POST", "/update_weights", {"update_info": dict(info)}, repeatable=False)

    async def finish_weight_update(self, version: str) -> None:
        await self._every("POST", "/finish_weight_update", {"weight_version": version}, repeatable=False)

    async def weight_version(self) -> str:
        """Of the full weights that all replicas serve; "default" until the first update."""
        answers = await self._every("GET", "/weight_info")
        versions = {answer["weight_version"] for answer in answers}
        if len(versions) != 1:
            raise SamplerError(f"replicas serve different weights: {sorted(versions)}")
        return str(versions.pop())

    async def health(self) -> None:
        """SamplerError when a replica cannot take requests."""
        await self._every("GET", "/health")

    async def _unload(self, url: str, name: str) -> None:
        try:
            await self._http.request("POST", f"{url}/v1/unload_lora_adapter", json={"lora_name": name})
        except HttpStatusError as error:
            if error.status not in (400, 404):  # not loaded
                raise SamplerError(f"unloading {name} from {url}: {error}") from error

    async def _every(
        self,
        method: str,
        path: str,
        json: Mapping[str, Any] | None = None,
        tolerated: "Callable[[HttpStatusError], bool] | None" = None,
        *,
        params: Mapping[str, str] | None = None,
        repeatable: bool = True,
    ) -> list[Any]:
        """The same call to every replica at once; SamplerError unless all of them did it."""

        async def one(url: str) -> Any:
            try:
                return await self._http.request(
                    method, url + path, json=json, params=params, repeatable=repeatable
                )
            except HttpStatusError as error:
                if tolerated is not None and tolerated(error):
                    return None
                raise SamplerError(f"{method} {url}{path}: {error}") from error

        return await self._gather(one(url) for url in self.server_urls)

    @staticmethod
    async def _gather(calls: Any) -> list[Any]:
        """All calls run to their end before the first failure is raised: none changes things later."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def _loaded(error: HttpStatusError) -> bool:
    return error.status == 400 and "already been loaded" in error.message
