"""Samples of vLLM carry the logprobs of a plain float32 forward, whatever shares the batch."""

import asyncio
from pathlib import Path

import numpy as np

from tests.inference.support.samplers import (
    Sampler,
    ask,
    assert_same_logprobs,
    prompt_of,
    publish_and_load,
    random_adapter,
    reference,
    target_logprobs,
    unique,
)


async def test_base_model_logprobs_are_exact(each_sampler: Sampler) -> None:
    prompt = prompt_of(20)
    output = await each_sampler("base", ask(prompt, num_samples=3, max_tokens=16))
    assert [len(sequence.tokens) for sequence in output.sequences] == [16, 16, 16]
    assert_same_logprobs(output, reference(each_sampler.facts.directory), prompt)


async def test_logprobs_are_raw_at_any_temperature(sampler: Sampler) -> None:
    prompt = prompt_of(20)
    output = await sampler("base", ask(prompt, temperature=0.5, top_p=0.9, top_k=50))
    assert_same_logprobs(output, reference(sampler.facts.directory), prompt)


async def test_base_is_exact_in_one_batch_with_adapters(each_sampler: Sampler, tmp_path: Path) -> None:
    directory, name = each_sampler.facts.directory, unique(tmp_path)
    adapters = {
        f"{name}-{seed}": random_adapter(directory, rank, seed) for seed, rank in enumerate((8, 16, 3))
    }
    for adapter_name, adapter in adapters.items():
        await publish_and_load(each_sampler, adapter, tmp_path, adapter_name)
    names = ["base", *adapters] * 4
    prompts = [prompt_of(5 + index, seed=index) for index in range(len(names))]
    outputs = await asyncio.gather(
        *(each_sampler(name, ask(prompt, max_tokens=12)) for name, prompt in zip(names, prompts, strict=True))
    )
    models = {name: reference(directory, adapters.get(name)) for name in set(names)}
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        assert_same_logprobs(output, models[name], prompt)


async def test_attention_only_adapter_is_exact(sampler: Sampler, tmp_path: Path) -> None:
    full = random_adapter(sampler.facts.directory, 4, seed=9, unembed=False)
    kept = {name: value for name, value in full.tensors.items() if "self_attn" in name}
    adapter = type(full)(full.spec, kept)
    name, prompt = unique(tmp_path), prompt_of(10)
    await publish_and_load(sampler, adapter, tmp_path, name)
    output = await sampler(name, ask(prompt))
    assert_same_logprobs(output, reference(sampler.facts.directory, adapter), prompt)


async def test_prompt_logprobs_are_exact_with_nan_first(each_sampler: Sampler) -> None:
    prompt = prompt_of(30)
    output = await each_sampler("base", ask(prompt, max_tokens=1, prompt_logprobs=True))
    assert output.prompt_logprobs is not None
    assert np.isnan(output.prompt_logprobs[0])
    expected = target_logprobs(reference(each_sampler.facts.directory), prompt)
    np.testing.assert_allclose(output.prompt_logprobs[1:], expected, atol=1e-3)


async def test_prompts_are_scored_with_their_own_adapter(each_sampler: Sampler, tmp_path: Path) -> None:
    """Prompts of unequal lengths in one batch, some with an adapter of lm_head, some with none."""
    directory, name = each_sampler.facts.directory, unique(tmp_path)
    adapter = random_adapter(directory, 8, seed=5)
    await publish_and_load(each_sampler, adapter, tmp_path, name)
    models = {"base": reference(directory), name: reference(directory, adapter)}
    names = ["base", name, name, "base", name]
    prompts = [prompt_of(length, seed=length) for length in (5, 6, 30, 31, 80)]
    requests = [ask(prompt, num_samples=2, max_tokens=4, prompt_logprobs=True) for prompt in prompts]
    outputs = await asyncio.gather(*map(each_sampler, names, requests))
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        expected = target_logprobs(models[name], prompt)
        np.testing.assert_allclose(output.prompt_logprobs[1:], expected, atol=1e-3)
        assert_same_logprobs(output, models[name], prompt)


async def test_a_prompt_of_the_whole_context_can_be_scored(sampler: Sampler) -> None:
    prompt = prompt_of(sampler.facts.context_length)
    output = await sampler("base", ask(prompt, max_tokens=1, prompt_logprobs=True))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)


async def test_repeated_prompts_count_cached_tokens(sampler: Sampler) -> None:
    prompt = prompt_of(200, seed=77)
    first = await sampler("base", ask(prompt))
    second = await sampler("base", ask(prompt))
    assert (first.cached_tokens, second.cached_tokens) == (0, 128)
    assert_same_logprobs(second, reference(sampler.facts.directory), prompt)
