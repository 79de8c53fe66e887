"""Adapters come and go while others are sampled; each name stands for one version."""

from pathlib import Path

import pytest

from skyrl_tinker.domain.ids import VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.errors import NotFoundError, SamplerError
from tests.inference.support.samplers import (
    Sampler,
    ask,
    assert_same_logprobs,
    prompt_of,
    publish_and_load,
    random_adapter,
    reference,
    unique,
)


async def test_an_unloaded_adapter_is_gone_and_can_come_back(sampler: Sampler, tmp_path: Path) -> None:
    name, prompt = unique(tmp_path), prompt_of(7)
    adapter = random_adapter(sampler.facts.directory, 8, seed=1)
    await publish_and_load(sampler, adapter, tmp_path, name)
    await sampler.client.control.unload_adapter(name)
    with pytest.raises(NotFoundError):
        await sampler(name, ask(prompt))
    await sampler.client.control.load_adapter(name, str(tmp_path / name))
    output = await sampler(name, ask(prompt))
    assert_same_logprobs(output, reference(sampler.facts.directory, adapter), prompt)


async def test_an_adapter_that_moved_to_disk_is_read_from_where_it_was(
    sampler: Sampler, tmp_path: Path
) -> None:
    name, prompt = unique(tmp_path), prompt_of(7)
    adapter = random_adapter(sampler.facts.directory, 8, seed=1)
    await publish_and_load(sampler, adapter, tmp_path, name)
    TmpfsSpill(tmp_path, tmp_path / "disk").move(WeightVersion(VersionId(1), "lora", str(tmp_path / name)))
    await sampler.client.control.unload_adapter(name)
    await sampler.client.control.load_adapter(name, str(tmp_path / name))
    output = await sampler(name, ask(prompt))
    assert_same_logprobs(output, reference(sampler.facts.directory, adapter), prompt)


async def test_loading_twice_and_unloading_twice_is_harmless(sampler: Sampler, tmp_path: Path) -> None:
    name = unique(tmp_path)
    await publish_and_load(sampler, random_adapter(sampler.facts.directory, 8, seed=1), tmp_path, name)
    await sampler.client.control.load_adapter(name, str(tmp_path / name))
    await sampler.client.control.unload_adapter(name)
    await sampler.client.control.unload_adapter(name)


async def test_more_adapters_than_slots_stay_exact(sampler: Sampler, tmp_path: Path) -> None:
    """4 fit a batch and 8 the memory; those beyond are read again from their directory."""
    name, prompt = unique(tmp_path), prompt_of(7)
    adapters = {f"{name}-{seed}": random_adapter(sampler.facts.directory, 4, seed) for seed in range(10)}
    for adapter_name, adapter in adapters.items():
        await publish_and_load(sampler, adapter, tmp_path, adapter_name)
    for adapter_name, adapter in adapters.items():
        output = await sampler(adapter_name, ask(prompt))
        assert_same_logprobs(output, reference(sampler.facts.directory, adapter), prompt)
        await sampler.client.control.unload_adapter(adapter_name)


async def test_an_adapter_that_one_replica_refuses_is_loaded_nowhere(
    sampler: Sampler, tmp_path: Path
) -> None:
    good = sampler.client.server_urls[0]
    sampler.client.control.server_urls = (good, "http://127.0.0.1:9")
    name = unique(tmp_path)
    with pytest.raises(SamplerError, match=r"127\.0\.0\.1:9"):
        await publish_and_load(sampler, random_adapter(sampler.facts.directory, 8, seed=1), tmp_path, name)
    with pytest.raises(NotFoundError):
        await sampler(name, ask(prompt_of(4)))


async def test_a_missing_adapter_directory_is_a_sampler_error(sampler: Sampler, tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match="load_lora_adapter"):
        await sampler.client.control.load_adapter(unique(tmp_path), str(tmp_path / "absent"))
