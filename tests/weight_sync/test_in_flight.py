"""Rollouts that run during a sync go on at the same token with the new policy."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
import torch
from transformers import PreTrainedModel

from skyrl_tinker.weight_sync.sync import sync_weights
from skyrl_tinker.weight_sync.transport import WeightTransport
from tests.inference.support.samplers import (
    CONTEXT,
    Sampler,
    prompt_of,
    reference,
    target_logprobs,
    write_model,
)

LENGTH = CONTEXT - 10
ENOUGH = 8  # tokens, to be sure that the rollout runs


@dataclass
class Rollout:
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[dict[str, Any]] = field(default_factory=list)
    under_way: asyncio.Event = field(default_factory=asyncio.Event)
    salt: str | None = None

    async def run(self, url: str) -> None:
        params = {
            "max_tokens": CONTEXT - len(self.prompt),
            "ignore_eos": True,
            "logprobs": 0,
            "temperature": 1.0,
            "seed": 1,
        }
        body = {"token_ids": self.prompt, "sampling_params": params, "stream": True, "cache_salt": self.salt}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{url}/inference/v1/generate", json=body) as response,
        ):
            async for choice in _choices(response):
                self.tokens += choice["token_ids"]
                self.logprobs += [each["logprob"] for each in choice["logprobs"]["content"]]
                self.versions = choice.get("weight_versions") or self.versions
                if len(self.tokens) >= ENOUGH:
                    self.under_way.set()

    def agreement(self, directory: str | Path) -> np.ndarray:
        """[tokens] bool: which have the logprob that these weights give them."""
        everything = (*self.prompt, *self.tokens)
        expected = target_logprobs(reference(directory), everything)[len(self.prompt) - 1 :]
        return np.abs(np.array(self.logprobs) - expected) < 1e-4


async def _choices(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield orjson.loads(line.removeprefix(b"data: "))["choices"][0]


async def switched_asleep(
    rollouts: list[Rollout], sampler: Sampler, transport: WeightTransport, new: Path
) -> None:
    """Run them all on the base; the new weights come while of the samplers only the weights are awake."""
    control = sampler.client.control
    await sync_weights(control, transport, Path(sampler.facts.directory), "base")
    running = [asyncio.create_task(rollout.run(sampler.client.server_urls[0])) for rollout in rollouts]
    await asyncio.gather(*(rollout.under_way.wait() for rollout in rollouts))
    await control.sleep(1, "keep")
    await control.wake_up(["weights"])
    await sync_weights(control, transport, new, "new", awake=False)
    assert await control.is_paused(), "nothing runs without its cache"
    await control.wake_up(["kv_cache"])
    await asyncio.gather(*running)


async def switched_under(
    rollouts: list[Rollout], sampler: Sampler, transport: WeightTransport, new: Path
) -> None:
    """Run them all on the base; when each has some tokens, the new weights come."""
    await sync_weights(sampler.client.control, transport, Path(sampler.facts.directory), "base")
    running = [asyncio.create_task(rollout.run(sampler.client.server_urls[0])) for rollout in rollouts]
    await asyncio.gather(*(rollout.under_way.wait() for rollout in rollouts))
    await sampler.client.control.pause("keep", clear_cache=False)  # held until the sync resumes it
    await sync_weights(sampler.client.control, transport, new, "new")
    await asyncio.gather(*running)


@pytest.mark.parametrize("switched", [switched_under, switched_asleep])
async def test_a_running_rollout_changes_regime_at_one_token(
    sampler: Sampler, transport: WeightTransport, tmp_path: Path, switched: Callable[..., Awaitable[None]]
) -> None:
    old, new = Path(sampler.facts.directory), tmp_path / "new"
    write_model(new, tied=sampler.facts.tied, seed=3)
    changes: list[int] = []
    while not changes:  # on a busy machine all may have ended before they could be held
        rollouts = [Rollout(prompt_of(10, seed)) for seed in range(4)]
        await switched(rollouts, sampler, transport, new)
        for rollout in rollouts:
            before, after = rollout.agreement(old), rollout.agreement(new)
            change = LENGTH if before.all() else int(np.argmin(before))  # the first token not of the old
            assert len(rollout.tokens) == LENGTH
            assert change > 0, "the first tokens came before the pause"
            assert after[change:].all()
            assert not after[:change].any(), "the two policies agree nowhere, so that the boundary is sharp"
            spans = [("base", 0, change), ("new", change, LENGTH)]
            found = [(span["version"], span["start"], span["end"]) for span in rollout.versions]
            assert found == [span for span in spans if span[1] < span[2]]
            changes += [change] if change < LENGTH else []
    await sync_weights(sampler.client.control, transport, old, "base")


async def test_a_rollout_goes_on_with_the_keys_and_values_that_it_has_if_they_are_kept(
    sampler: Sampler, transport: WeightTransport, tmp_path: Path
) -> None:
    """And what comes later, under another salt, finds none of them."""
    control = sampler.client.control
    old, new = Path(sampler.facts.directory), tmp_path / "new"
    write_model(new, tied=sampler.facts.tied, seed=3)
    await sync_weights(control, transport, old, "base")
    change = 0
    while not change:  # on a busy machine it may have ended before it could be held
        rollout = Rollout(prompt_of(140), salt="old")  # more than a block of the cache
        running = asyncio.create_task(rollout.run(sampler.client.server_urls[0]))
        await rollout.under_way.wait()
        await control.pause("keep", clear_cache=False)
        await sync_weights(control, transport, new, "new", keep_cache=True)
        await running
        change = sum(span["start"] for span in rollout.versions if span["version"] == "new")
    everything = (*rollout.prompt, *rollout.tokens)
    at = len(rollout.prompt) + change
    expected = kept_logprobs(reference(old), reference(new), everything, at - 1)
    assert rollout.agreement(old)[:change].all()
    np.testing.assert_allclose(rollout.logprobs[change:], expected, atol=1e-4)
    assert not rollout.agreement(new)[change:].all(), "else it could not be told from a recomputed one"

    cached = [await cached_tokens(sampler, rollout.prompt, salt) for salt in ("new", "old")]
    assert cached[0] == 0 < cached[1]
    await sync_weights(control, transport, old, "base")


@torch.no_grad()
def kept_logprobs(
    old: PreTrainedModel, new: PreTrainedModel, tokens: tuple[int, ...], kept: int
) -> np.ndarray:
    """[len(tokens) - kept - 1]: of those behind the next one, if `new` goes on from the cache of `old`."""
    cache = old(torch.tensor([tokens[:kept]]), use_cache=True).past_key_values
    logits = new(torch.tensor([tokens[kept:-1]]), past_key_values=cache).logits[0]
    targets = torch.tensor(tokens[kept + 1 :]).unsqueeze(1)
    return torch.log_softmax(logits, -1).gather(1, targets)[:, 0].numpy()


async def cached_tokens(sampler: Sampler, prompt: tuple[int, ...], salt: str) -> int:
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 1}, "cache_salt": salt}
    usage = (await sampler.client.data.generate({"model": "base", **body}))["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"] or 0)
