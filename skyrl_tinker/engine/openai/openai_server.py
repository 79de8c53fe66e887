"""OpenAI-compatible requests of one base model, prepared for its samplers and answered by them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web

from skyrl_tinker.domain.ids import OwnerId, openai_session
from skyrl_tinker.domain.values import BaseModelFacts, WeightVersion
from skyrl_tinker.engine.openai.chat_abilities import ChatAbilities
from skyrl_tinker.engine.openai.grammar_turns import GrammarTurns
from skyrl_tinker.engine.openai.openai_call import OpenAICall
from skyrl_tinker.engine.openai.openai_relay import OpenAIRelay
from skyrl_tinker.engine.openai.openai_requests import (
    OpenAIRequest,
    prompt_lengths,
    require_one_sequence,
    texts_to_count,
    upstream_body,
)
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.scheduling.priorities import share_of
from skyrl_tinker.engine.telemetry.engine_metrics import OutcomeLabel
from skyrl_tinker.errors import RequestGivenUpError
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.system.atomic_directory import storage_errors
from skyrl_tinker.system.off_loop import in_disk_thread, off_loop

_SHORTEST: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "n": 1,
    "max_tokens": 1,
    "stream": False,
    "stream_options": None,
}
"""Fields of a chat that a sampler answers as soon as it has compiled the grammar."""


@dataclass(eq=False)
class OpenAIServer:
    _samplers: Samplers
    _fleet: Fleet
    facts: BaseModelFacts
    _read_abilities: Callable[[], ChatAbilities]
    _sampler_driver: SamplerDriver
    _relay: OpenAIRelay

    def __post_init__(self) -> None:
        self._abilities: ChatAbilities | None = None
        self._grammars = GrammarTurns()

    async def answer(
        self,
        http: web.Request,
        request: OpenAIRequest,
        size: int,
        owner: OwnerId | None,
        version: WeightVersion | None,
    ) -> tuple[web.StreamResponse, OutcomeLabel]:
        """Answer a request whose body has `size` bytes; returns the answer with its outcome.

        `version`: to sample, None for the base model. Raises SkyrlTinkerError before the answer has begun.
        """
        async with AsyncExitStack() as upstream:
            with self._sampler_driver.arriving():
                abilities = await self.abilities()
                texts = await off_loop(size, lambda: texts_to_count(request, self.facts, abilities))
                await upstream.enter_async_context(self._samplers.gate.passage())
                call = await self._prepare(request, texts, size, owner, version)
                if call.request.restricted_by is not None:
                    await self._compiled(call)
            if call.request.stream:
                return await self._relay.stream(http, call, upstream)
            return await self._relay.complete(call), "ok"

    async def _prepare(
        self,
        request: OpenAIRequest,
        texts: Sequence[dict[str, Any]],
        size: int,
        owner: OwnerId | None,
        version: WeightVersion | None,
    ) -> OpenAICall:
        """Prepare a request, with the files of its version here. Call it before taking a turn.

        `texts`: its texts_to_count.
        """
        facts, abilities = self.facts, await self.abilities()
        await self._samplers.fetch(version, share_of(owner, openai_session(owner)))
        counts = await asyncio.gather(*(self._count_tokens(text) for text in texts))
        prompts = await off_loop(size, lambda: prompt_lengths(request, counts, facts))
        if self._fleet.disaggregated:
            require_one_sequence(request, len(prompts))
        body = await off_loop(size, lambda: upstream_body(request, max(prompts), facts, abilities))
        reader = self._fleet.client.data.dialect.openai_reader(body)
        return OpenAICall(request, owner, version, prompts, body, reader)

    async def abilities(self) -> ChatAbilities:
        """Return abilities, read with the first request: one base model's files must not end the engine."""
        if self._abilities is None:
            with storage_errors("the tokenizer's files cannot be read"):
                self._abilities = await in_disk_thread(self._read_abilities)
        return self._abilities

    async def _count_tokens(self, text: dict[str, Any]) -> int:
        """Count the tokens of a prompt. Every version has the tokenizer of the base model."""
        return len(await self._fleet.with_retry(lambda: self._fleet.client.data.tokenize(text)))

    async def _compiled(self, call: OpenAICall) -> None:
        """Return once each replica has compiled the request's grammar. Call it before taking a turn."""
        share, known_by = share_of(call.owner, openai_session(call.owner)), self._fleet.generation
        attempt = partial(self._relay.with_retry, call, lambda: self._compile(call))
        await self._grammars.compiled(share, (known_by, call.grammar), attempt)

    async def _compile(self, call: OpenAICall) -> bool:
        """Have each replica compile the request's grammar, the first one alone: it may die of it.

        The grammar is that of the tokenizer, which all versions share: it needs no weights of its own.
        Returns False if a replica gave the token up, perhaps as others have diverged: the request tells.
        """
        async with self._fleet.placement.sampling():
            body = self._relay.body(replace(call, body={**call.body, **_SHORTEST}), BASE_MODEL, 0)
            data, urls = self._fleet.client.data, self._fleet.client.server_urls

            async def on(url: str) -> bool:
                with suppress(RequestGivenUpError):
                    await data.openai(call.path, body, server=url)
                    return True
                return False

            with call.naming_grammar():
                compiled = [
                    each for some in (urls[:1], urls[1:]) for each in await asyncio.gather(*map(on, some))
                ]
            return all(compiled)
