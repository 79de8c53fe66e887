"""The data plane: what any replica may serve."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_tinker.errors import NotFoundError, SamplerError, UserError
from skyrl_tinker.inference import sampling
from skyrl_tinker.inference.http import HttpStatusError, JsonHttp
from skyrl_tinker.inference.sampling import Answer, Generated
from skyrl_tinker.wire.values import SampleOutput, SampleRequest

ABORT_PAUSE_S = 0.05
"""Between tries of a sequence that is aborted again and again while samplers are paused."""


@dataclass
class DataPlane:
    """`proxy_url`: the router, or the server itself when there is one only."""

    proxy_url: str
    _http: JsonHttp = field(default_factory=JsonHttp, repr=False, compare=False, kw_only=True)

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


@dataclass(frozen=True, slots=True)
class _Call:
    """What stays the same over the requests that one sample call makes."""

    plane: DataPlane
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
        url = f"{self.plane.proxy_url}/inference/v1/generate"
        headers = {"X-Session-ID": self.session_key}
        try:
            return await self.plane._http.request("POST", url, json=body, headers=headers)
        except HttpStatusError as error:
            raise _refusal(error) from error


def _refusal(error: HttpStatusError) -> UserError | SamplerError:
    if error.status == 404:
        return NotFoundError(error.message)
    if error.status in (400, 422):
        return UserError(error.message)
    return SamplerError(f"the sampler answered {error}")
