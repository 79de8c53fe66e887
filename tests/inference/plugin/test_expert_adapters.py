"""Adapters of routed experts: vLLM samples a mixture of experts with the logprobs of merged weights."""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from skyrl_tinker.domain.peft_config import ALPHA
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.inference.servers.sampler_spec import SamplerSpec
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_tinker.weight_sync.sync import sync_weights
from tests.inference.support.samplers import (
    AdapterWeights,
    Sampler,
    Served,
    ask,
    load_weights,
    make_sampler,
    prompt_of,
    publish_adapter,
    reference,
    spec_of,
    target_logprobs,
    write_model,
)

TOP_K = 2
ATTENTION, EXPERTS = "self_attn", "mlp.experts"


@pytest.fixture(scope="module")
def running(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One replica, of which a batch holds two adapters."""
    root = tmp_path_factory.mktemp("experts")
    facts = write_model(root / "model", tied=False, arch="qwen3-moe")
    served = Served(facts, ServerGroup.launch(_spec(facts, root / "logs")))
    asyncio.run(served.group.ready())
    yield served
    asyncio.run(served.group.shutdown())


async def test_adapted_experts_have_the_logprobs_of_merged_weights(running: Served, tmp_path: Path) -> None:
    """Adapters of all layers, of attention alone and of experts alone, in slots that others have left."""
    sampler = make_sampler(running)
    base = Path(running.facts.directory)
    adapters = {
        "all": _adapter(base, 8, 1, ATTENTION, EXPERTS),
        "experts": _adapter(base, 3, 2, EXPERTS),
        "attention": _adapter(base, 4, 3, ATTENTION),
        "others": _adapter(base, 16, 4, ATTENTION, EXPERTS),
    }
    directories = {"base": base}
    for name, adapter in adapters.items():
        publish_adapter(adapter, tmp_path / name, str(base))
        directories[name] = _merged(base, tmp_path / f"{name}-merged", adapter)
    for name in adapters:
        await sampler.client.control.load_adapter(name, str(tmp_path / name))
    for names in (("base", "all", "experts"), ("attention", "base", "others"), ("all", "base"), ("base",)):
        await _assert_sampled(sampler, {name: directories[name] for name in names})
    await sampler.client.close()


async def test_new_weights_reach_adapted_experts(running: Served, tmp_path: Path) -> None:
    sampler = make_sampler(running)
    base = Path(running.facts.directory)
    adapter = _adapter(base, 8, 5, ATTENTION, EXPERTS)
    publish_adapter(adapter, tmp_path / "adapter", str(base))
    await sampler.client.control.load_adapter("adapter", str(tmp_path / "adapter"))
    full = _merged(base, tmp_path / "full", _adapter(base, 8, 6, ATTENTION, EXPERTS))
    for directory in (full, base):
        await sync_weights(sampler.client.control, SharedMemoryTransport(100_000), directory, directory.name)
        merged = _merged(directory, tmp_path / f"{directory.name}-adapter", adapter)
        await _assert_sampled(sampler, {"base": directory, "adapter": merged})
    await sampler.client.close()


def _spec(facts: BaseModelFacts, log_dir: Path) -> SamplerSpec:
    return replace(spec_of(facts, log_dir), max_loras=2)


def _adapter(base: Path, rank: int, seed: int, *parts: str) -> AdapterWeights:
    """Adapt the matrices of these parts; experts at rank // TOP_K, but at least 1."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, weight in load_weights(base).items():
        if weight.ndim < 2 or not any(part in name for part in parts):
            continue
        own = max(1, rank // TOP_K) if EXPERTS in name else rank
        for matrix, shape in (("A", (own, weight.shape[1])), ("B", (weight.shape[0], own))):
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_{matrix}.weight"
            tensors[key] = generator.normal(0, 0.1, shape).astype(np.float32)
    return AdapterWeights(LoraSpec(rank=rank, seed=seed), tensors)


def _merged(base: Path, directory: Path, adapter: AdapterWeights) -> Path:
    """Write the model with W + ALPHA / rank * B A."""
    weights = load_weights(base)
    for name, a in adapter.tensors.items():
        if ".lora_A." in name:
            b = adapter.tensors[name.replace("lora_A", "lora_B")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += ALPHA / adapter.spec.rank * (b @ a)
    directory.mkdir()
    shutil.copy(base / "config.json", directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def _assert_sampled(sampler: Sampler, models: dict[str, Path]) -> None:
    """In one batch, prompts of unequal lengths. `models`: merged weights by the sampler's name."""
    names = [*models] * 2
    prompts = [prompt_of(5 + 40 * index, seed=index) for index in range(len(names))]
    requests = [ask(prompt, num_samples=2, max_tokens=12, prompt_logprobs=True) for prompt in prompts]
    outputs = await asyncio.gather(*map(sampler, names, requests))
    expected = {name: reference(directory) for name, directory in models.items()}
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for sequence in output.sequences:
            found = [*output.prompt_logprobs[1:], *sequence.logprobs]
            wanted = target_logprobs(expected[name], prompt + sequence.tokens)
            np.testing.assert_allclose(found, wanted, atol=1e-4, err_msg=name)
