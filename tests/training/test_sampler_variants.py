"""vLLM has the trainer's logprobs also with experts apart, data parallel, and with Gemma 3's vocabulary."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess
from tests.inference.support.samplers import (
    Served,
    ask,
    assert_same_logprobs,
    make_sampler,
    prompt_of,
    reference,
    spec_of,
    write_model,
)
from tests.inference.vllm.plugin.test_routed_experts import assert_experts
from tests.training.conftest import MakeWorker
from tests.training.support.saves import read_weights, write_weights
from tests.training.test_sampled_families import SHARED_MEMORY, assert_all_sampled, assert_sampled

pytestmark = pytest.mark.long

LORA = ModelKey(1)
PROMPT = (5, 262_143, 17, 300, 262_000)
RANKS = {"data-parallel-size": 2, "disable-log-stats": False}
MIXTURE = {
    "arch": "qwen3-moe",
    "max_lora_rank": 0,
    "router_replay": True,
    "engine": VllmProcess({**RANKS, "enable-expert-parallel": True}),
}


@asynccontextmanager
async def serving(
    root: Path, *, vocab: int = 512, arch: str = "qwen3", **given: Any
) -> AsyncIterator[Served]:
    """One replica. `given`: fields of SamplerSpec."""
    facts = write_model(root / "base", tied=False, arch=arch, vocab=vocab)
    served = Served(facts, ServerGroup.launch(replace(spec_of(facts, root / "logs"), **given)))
    try:
        await served.group.ready()
        yield served
    finally:
        await served.group.shutdown()


async def test_experts_in_two_processes_have_the_trainers_logprobs(
    ray_cluster: None, make_worker: MakeWorker, tmp_path: Path
) -> None:
    """Each process has half of the experts, in place of half of each."""
    engine = VllmProcess({"enable-expert-parallel": True})
    async with serving(tmp_path, arch="qwen3-moe", tensor_parallel_size=2, engine=engine) as served:
        await assert_all_sampled(make_sampler(served), SHARED_MEMORY, make_worker, tmp_path)


async def test_a_vocabulary_as_large_as_gemma_3s_is_adapted(
    ray_cluster: None, make_worker: MakeWorker, tmp_path: Path
) -> None:
    async with serving(tmp_path, arch="gemma3", vocab=262_144, max_loras=1, max_cpu_loras=1) as served:
        sampler = make_sampler(served)
        worker = make_worker(served.facts.directory, models={LORA: LoraSpec(8, 1)})
        write_weights(worker, LORA, tmp_path / "adapter")
        assert any("lm_head" in name for name in read_weights(tmp_path / "adapter"))
        await sampler.client.control.load_adapter("adapter", str(tmp_path / "adapter"))
        await assert_sampled(sampler, worker, PROMPT, adapter=LORA)
        await sampler.client.close()


@pytest.mark.parametrize("given", [{}, MIXTURE], ids=["dense", "mixture"])
async def test_all_data_parallel_ranks_sample_pause_and_take_weights(
    ray_cluster: None, make_worker: MakeWorker, tmp_path: Path, given: Mapping[str, Any]
) -> None:
    """Those of a mixture have some of the experts each, and no adapters."""
    async with serving(tmp_path, **{"engine": VllmProcess(RANKS), **given}) as served:
        adapters = given == {}
        await assert_all_sampled(
            make_sampler(served), SHARED_MEMORY, make_worker, tmp_path, adapters=adapters
        )
        sampler = make_sampler(served)
        control, model = sampler.client.control, reference(served.facts.directory)
        assert await control.world_size() == 2
        prompts = [prompt_of(20 + index, seed=index) for index in range(8)]
        before = await _generated(control.server_urls[0])
        await control.pause()
        requests = [ask(prompt, max_tokens=16, routed_experts=bool(given)) for prompt in prompts]
        running = [asyncio.create_task(sampler("base", request)) for request in requests]
        await asyncio.sleep(0.5)
        assert await _generated(control.server_urls[0]) == before
        await control.resume()
        for prompt, output in zip(prompts, await asyncio.gather(*running), strict=True):
            assert_same_logprobs(output, model, prompt)
            if given:
                assert_experts(output, model, prompt)
        grown = await _generated(control.server_urls[0]) - before
        assert grown == {"0": 4 * 16, "1": 4 * 16}
        await sampler.client.close()


async def _generated(url: str) -> Counter[str]:
    """Read how many tokens each rank's engine core has generated."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        text = await response.text()
    found = re.findall(r'^vllm:generation_tokens_total\{engine="(\d)".*\} ([\d.e+]+)$', text, re.MULTILINE)
    return Counter({engine: int(float(count)) for engine, count in found})
