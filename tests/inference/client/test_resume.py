"""Aborted sequences are completed, under the same weights or others; those that stand still go on."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from skyrl_tinker.domain.samples import SampleRequest
from tests.inference.support.samplers import (
    CONTEXT,
    FixedLeases,
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

PARTS = (1 / 2, 1 / 3, 1 / 4, 1 / 8, 1 / 16)
"""When to disturb a request, of the time that it takes alone: the first of these that hits it in flight."""


async def abort_while(sampler: Sampler, sampling: "asyncio.Task[object]") -> int:
    """Abort what runs, again and again until the request is through; returns how often."""
    aborts = 0
    while not sampling.done():
        await asyncio.sleep(0.1)
        await sampler.client.control.pause("abort")
        await sampler.client.control.resume()
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
    await sampler.client.control.pause("abort")
    await sampler.client.control.resume()
    output = await sampling
    assert output.sequences[index_of].tokens == undisturbed.sequences[index_of].tokens


async def test_requests_stand_still_during_a_pause_and_then_go_on(sampler: Sampler) -> None:
    prompt = prompt_of(6)
    request = ask(prompt, max_tokens=CONTEXT - 6)
    alone = await duration(sampler, request)
    for part in PARTS:
        sampling = asyncio.create_task(sampler("base", request))
        await asyncio.sleep(alone * part)
        await sampler.client.control.pause("keep")
        if not sampling.done():
            break
        await sampler.client.control.resume()
    done, _ = await asyncio.wait([sampling], timeout=0.5)
    assert not done
    await sampler.client.control.resume()
    assert_same_logprobs(await sampling, reference(sampler.facts.directory), prompt)


async def test_a_switched_policy_goes_on_at_the_same_token_position(sampler: Sampler, tmp_path: Path) -> None:
    """Tokens carry the logprobs of the policy that their span names; samples of others run undisturbed."""
    prompt, name = prompt_of(6), unique(tmp_path)
    models = {}
    for version in (f"{name}a", f"{name}b"):
        adapter = random_adapter(sampler.facts.directory, 8, seed=len(models))
        await publish_and_load(sampler, adapter, tmp_path, version)
        models[version] = reference(sampler.facts.directory, adapter)
    old, new = models
    request = ask(prompt, num_samples=3, max_tokens=200, seed=5)
    undisturbed = await sampler("base", request)
    alone = await duration(sampler, request)
    for part in PARTS:
        leases = FixedLeases(old)
        switched = asyncio.create_task(sampler(leases, request, "one"))
        other = asyncio.create_task(sampler("base", request, "other"))
        await asyncio.sleep(alone * part)
        leases.model = new
        await sampler.client.control.abort("one")
        assert [each.tokens for each in (await other).sequences] == [
            each.tokens for each in undisturbed.sequences
        ]
        if all(len(sequence.versions) == 2 for sequence in (await switched).sequences):
            break

    for sequence in switched.result().sequences:
        first, second = sequence.versions
        assert (first.version, first.start, second.version, second.end) == (old, 0, new, 200)
        assert 0 < first.end == second.start < 200
        for span in sequence.versions:
            expected = target_logprobs(models[span.version], prompt + sequence.tokens)[len(prompt) - 1 :]
            np.testing.assert_allclose(
                sequence.logprobs[span.start : span.end], expected[span.start : span.end], atol=1e-4
            )


async def duration(sampler: Sampler, request: SampleRequest) -> float:
    began = asyncio.get_running_loop().time()
    await sampler("base", request)
    return asyncio.get_running_loop().time() - began


async def test_a_seeded_sequence_goes_on_however_often_its_policy_is_switched(sampler: Sampler) -> None:
    request = ask(prompt_of(6), max_tokens=CONTEXT - 6, seed=5)
    sampling = asyncio.create_task(sampler("base", request, "often"))
    await abort_often(sampler, "often")
    output = await sampling
    assert len(output.sequences[0].tokens) == CONTEXT - 6
    assert_same_logprobs(output, reference(sampler.facts.directory), prompt_of(6))


async def abort_often(sampler: Sampler, tag: str) -> None:
    for _ in range(8):
        await asyncio.sleep(0.1)
        await sampler.client.control.abort(tag)


async def test_a_stop_string_is_found_across_an_abort(sampler: Sampler) -> None:
    prompt = prompt_of(6)
    tokens = (await sampler("base", ask(prompt, temperature=0.0, max_tokens=200))).sequences[0].tokens
    text = await sampler.client.data.detokenize(tokens)
    stop = next(text[at : at + 5] for at in range(len(text) - 20, 0, -1) if text[at : at + 5].isascii())
    request = ask(prompt, temperature=0.0, max_tokens=200, stop=(stop,))
    undisturbed = await sampler("base", request)
    sampling = asyncio.create_task(sampler("base", request, "stopping"))
    await abort_often(sampler, "stopping")
    output = await sampling
    assert output.sequences[0].tokens == undisturbed.sequences[0].tokens
    assert output.sequences[0].stop_reason == "stop"


async def test_an_abort_of_nothing_returns_at_once(sampler: Sampler) -> None:
    await sampler.client.control.abort("nobody")
