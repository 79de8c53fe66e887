"""The one way to the samplers: a routed data plane and a control plane that reaches every replica."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from skyrl_tinker.errors import NotFoundError, SamplerError, UserError
from skyrl_tinker.inference import sampling
from skyrl_tinker.inference.http import HttpStatusError, JsonHttp
from skyrl_tinker.inference.sampling import Answer, Generated
from skyrl_tinker.wire.values import SampleOutput, SampleRequest

ABORT_PAUSE_S = 0.05
"""Between tries of a sequence that is aborted again and again while samplers are paused."""
PauseMode = Literal["abort", "wait", "keep"]


@dataclass
class RemoteInferenceClient:
    """Picklable. `proxy_url` takes what any replica may serve, `server_urls` are all replicas."""

    proxy_url: str
    server_urls: tuple[str, ...]
    _http: JsonHttp = field(default_factory=JsonHttp, repr=False, compare=False)

    def retarget(self, urls: tuple[str, ...]) -> None:
        """After a restart: the servers have other addresses."""
        self.proxy_url, self.server_urls = urls[0], urls

    # Data plane

    async def sample(
        self, model: str, request: SampleRequest, *, session_key: str, eos: tuple[int, ...], context: int
    ) -> SampleOutput:
        """Sample from the base model (`spec.BASE_MODEL` or a name of it) or from a loaded adapter.

        `eos` ends sequences unless request.params.stop is (); `context` bounds max_tokens None. Sequences
        that a weight update aborts are completed. NotFoundError: no such adapter (load it again);
        UserError: vLLM refused the request; SamplerError: it could not be served.
        """
        call = _Call(self, model, session_key, eos, context)
        parts = sampling.split(request)
        answers = await asyncio.gather(*(call.generate(part) for part in parts))
        sequences = await asyncio.gather(
            *(
                call.complete(part, index, generated)
                for part, answer in zip(parts, answers, strict=True)
                for index, generated in enumerate(answer.sequences)
            )
        )
        return sampling.output(request, answers, sequences)

    # Control plane

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

    async def close(self) -> None:
        await self._http.close()

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


@dataclass(frozen=True, slots=True)
class _Call:
    """What stays the same over the requests that one sample call makes."""

    client: RemoteInferenceClient
    model: str
    session_key: str
    eos: tuple[int, ...]
    context: int

    async def generate(self, request: SampleRequest) -> Answer:
        """One request; sent again as a whole when it was aborted before its prompt was scored."""
        body = sampling.body(self.model, request, eos=self.eos, context=self.context)
        while True:
            answer = sampling.parse(await self._post(body), request)
            if answer.prompt_logprobs is not None or not request.prompt_logprobs:
                return answer
            await asyncio.sleep(ABORT_PAUSE_S)

    async def complete(self, request: SampleRequest, index: int, generated: Generated) -> Generated:
        """Resubmit what is left of an aborted sequence until it ends by itself."""
        while generated.finish == "abort":
            await asyncio.sleep(ABORT_PAUSE_S)
            kept, rest = sampling.remainder(request, index, generated, context=self.context)
            answer = await self.generate(rest)
            generated = sampling.join(kept, answer.sequences[0])
        return generated

    async def _post(self, body: Mapping[str, Any]) -> Any:
        url = f"{self.client.proxy_url}/inference/v1/generate"
        headers = {"X-Session-ID": self.session_key}
        try:
            return await self.client._http.request("POST", url, json=body, headers=headers)
        except HttpStatusError as error:
            raise _refusal(error) from error


def _refusal(error: HttpStatusError) -> UserError | SamplerError:
    if error.status == 404:
        return NotFoundError(error.message)
    if error.status in (400, 422):
        return UserError(error.message)
    return SamplerError(f"the sampler answered {error}")
