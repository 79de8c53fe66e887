"""Adapters of routed experts: vLLM samples a mixture of experts with the logprobs of merged weights."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from skyrl_tinker.domain.peft_config import ADAPTER_CONFIG_FILE
from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_tinker.weight_sync.sync import sync_weights
from tests.inference.support.mixtures import ATTENTION, EXPERTS, expert_adapter, write_merged
from tests.inference.support.samplers import (
    Sampler,
    Served,
    ask,
    make_sampler,
    prompt_of,
    publish_adapter,
    reference,
    target_logprobs,
)

pytestmark = pytest.mark.long


async def test_adapted_experts_have_the_logprobs_of_merged_weights(mixture: Served, tmp_path: Path) -> None:
    """Adapters of all layers, of attention alone and of experts alone, in slots that others have left."""
    sampler = make_sampler(mixture)
    base = Path(mixture.facts.directory)
    adapters = {
        "all": expert_adapter(base, 8, 1, ATTENTION, EXPERTS),
        "experts": expert_adapter(base, 3, 2, EXPERTS),
        "attention": expert_adapter(base, 4, 3, ATTENTION),
        "others": expert_adapter(base, 16, 4, ATTENTION, EXPERTS),
    }
    directories = {"base": base}
    for name, adapter in adapters.items():
        publish_adapter(adapter, tmp_path / name, str(base))
        directories[name] = write_merged(base, tmp_path / f"{name}-merged", adapter)
    for name in adapters:
        await sampler.client.control.load_adapter(name, str(tmp_path / name))
    for names in (("base", "all", "experts"), ("attention", "base", "others"), ("all", "base"), ("base",)):
        await _assert_sampled(sampler, {name: directories[name] for name in names})
    await sampler.client.close()


async def test_slots_of_experts_have_their_part_of_the_rank(mixture: Served, tmp_path: Path) -> None:
    """8 of 16: an adapter with 9 is refused, and others are sampled as before."""
    sampler = make_sampler(mixture)
    base = Path(mixture.facts.directory)
    fitting, larger = (expert_adapter(base, rank, 7, EXPERTS) for rank in (16, 18))
    publish_adapter(replace(larger, spec=fitting.spec), tmp_path / "larger", str(base))
    file = tmp_path / "larger" / ADAPTER_CONFIG_FILE
    config = json.loads(file.read_text())
    del config["rank_pattern"][r"experts\.gate_up_proj"]  # twice the rank, which vLLM itself refuses here
    file.write_text(json.dumps(config))
    with pytest.raises(SkyrlTinkerError, match="rank 9 for each expert, expected at most 8"):
        await sampler.client.control.load_adapter("larger", str(tmp_path / "larger"))
    publish_adapter(fitting, tmp_path / "fitting", str(base))
    await sampler.client.control.load_adapter("fitting", str(tmp_path / "fitting"))
    merged = write_merged(base, tmp_path / "merged", fitting)
    await _assert_sampled(sampler, {"base": base, "fitting": merged})
    await sampler.client.close()


async def test_new_weights_reach_adapted_experts(mixture: Served, tmp_path: Path) -> None:
    sampler = make_sampler(mixture)
    base = Path(mixture.facts.directory)
    adapter = expert_adapter(base, 8, 5, ATTENTION, EXPERTS)
    publish_adapter(adapter, tmp_path / "adapter", str(base))
    await sampler.client.control.load_adapter("adapter", str(tmp_path / "adapter"))
    full = write_merged(base, tmp_path / "full", expert_adapter(base, 8, 6, ATTENTION, EXPERTS))
    for directory in (full, base):
        await sync_weights(sampler.client.control, SharedMemoryTransport(100_000), directory, directory.name)
        merged = write_merged(directory, tmp_path / f"{directory.name}-adapter", adapter)
        await _assert_sampled(sampler, {"base": directory, "adapter": merged})
    await sampler.client.close()


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
