"""Sequences that a weight update aborts are completed; requests that stand still go on."""

import asyncio

import pytest

from tests.inference.samplers import Sampler, ask, assert_same_logprobs, prompt_of, reference


async def abort_while(sampler: Sampler, sampling: "asyncio.Task[object]") -> int:
    """Abort what runs, again and again until the request is through; returns how often."""
    aborts = 0
    while not sampling.done():
        await asyncio.sleep(0.1)
        await sampler.client.pause("abort")
        await sampler.client.resume()
        aborts += 1
        await asyncio.sleep(0.3)
    return aborts


async def test_aborted_sequences_are_completed_with_every_logprob(sampler: Sampler) -> None:
    prompt = prompt_of(6)
    request = ask(prompt, num_samples=4, max_tokens=200, prompt_logprobs=True)
    async with asyncio.TaskGroup() as tasks:
        sampling = tasks.create_task(sampler("base", request))
        aborts = tasks.create_task(abort_while(sampler, sampling))
    output = sampling.result()
    assert aborts.result() >= 1
    assert [len(sequence.tokens) for sequence in output.sequences] == [200] * 4
    assert [sequence.stop_reason for sequence in output.sequences] == ["length"] * 4
    assert output.prompt_logprobs is not None
    assert_same_logprobs(output, reference(sampler.facts.directory), prompt)


@pytest.mark.parametrize("index_of", [0, 2])
async def test_an_aborted_seeded_sequence_is_as_if_never_interrupted(sampler: Sampler, index_of: int) -> None:
    request = ask(prompt_of(6), num_samples=3, max_tokens=150, seed=5)
    undisturbed = await sampler("base", request)
    sampling = asyncio.create_task(sampler("base", request))
    await asyncio.sleep(0.1)
    await sampler.client.pause("abort")
    await sampler.client.resume()
    output = await sampling
    assert output.sequences[index_of].tokens == undisturbed.sequences[index_of].tokens


async def test_requests_stand_still_during_a_pause_and_then_go_on(sampler: Sampler) -> None:
    prompt = prompt_of(6)
    sampling = asyncio.create_task(sampler("base", ask(prompt, max_tokens=150)))
    await asyncio.sleep(0.1)
    await sampler.client.pause("keep")
    done, _ = await asyncio.wait([sampling], timeout=0.5)
    assert not done
    await sampler.client.resume()
    assert_same_logprobs(await sampling, reference(sampler.facts.directory), prompt)
