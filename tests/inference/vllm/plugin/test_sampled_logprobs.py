"""Both values of `sampled_logprobs`: log_softmax(logits), or log_softmax(logits / T), of a plain forward."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import torch

from skyrl_tinker.domain.samples import SampledSequence, TargetTokens
from skyrl_tinker.errors import SamplerError
from tests.inference.support.samplers import (
    CONTEXT,
    Sampler,
    Served,
    all_logprobs,
    ask,
    launch,
    make_sampler,
    prompt_of,
    reference,
)
from tests.support.sampler_clients import vllm_servers

pytestmark = pytest.mark.long

TEMPERATURE = 0.5
ATOL = 1e-3
PROMPT = prompt_of(20)


@pytest.fixture(scope="module")
def processing(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server like the untied one, of processed logprobs."""
    served = launch(tmp_path_factory.mktemp("processed"), "untied", sampled_logprobs="processed")
    asyncio.run(served.group.ready())
    yield served
    asyncio.run(served.group.shutdown())


@pytest.fixture
async def processed(processing: Served) -> AsyncIterator[Sampler]:
    sampler = make_sampler(processing)
    yield sampler
    await sampler.client.close()


@pytest.fixture
async def raw(sampler: Sampler) -> Sampler:
    return sampler


def rows_of(sampler: Sampler, sequence: SampledSequence) -> torch.Tensor:
    """log_softmax(logits) of what may stand at each sampled token's place, [tokens, vocabulary]."""
    model = reference(sampler.facts.directory)
    return all_logprobs(model, PROMPT + sequence.tokens)[len(PROMPT) - 1 :]


def at_temperature(logprobs: torch.Tensor) -> torch.Tensor:
    """log_softmax(logits / T): a constant added to all logits changes nothing."""
    return torch.log_softmax(logprobs / TEMPERATURE, -1)


def assert_drawn_from(rows: torch.Tensor, sequence: SampledSequence) -> None:
    expected = rows[torch.arange(len(rows)), torch.tensor(sequence.tokens)]
    np.testing.assert_allclose(sequence.logprobs, expected, atol=ATOL)


async def test_a_temperature_counts_in_processed_logprobs_and_not_in_raw_ones(
    raw: Sampler, processed: Sampler
) -> None:
    request = ask(PROMPT, num_samples=4, max_tokens=16, temperature=TEMPERATURE, seed=1)
    ours, tempered = await asyncio.gather(raw("base", request), processed("base", request))
    for sequence in ours.sequences:
        assert_drawn_from(rows_of(raw, sequence), sequence)
    for sequence in tempered.sequences:
        assert_drawn_from(at_temperature(rows_of(processed, sequence)), sequence)
    assert [each.tokens for each in ours.sequences] == [each.tokens for each in tempered.sequences]
    assert np.abs(np.subtract(ours.sequences[0].logprobs, tempered.sequences[0].logprobs)).max() > 0.1


async def test_at_temperature_1_both_are_the_same(raw: Sampler, processed: Sampler) -> None:
    request = ask(PROMPT, max_tokens=16, seed=2, topk_sample_logprobs=3)
    ours, tempered = await asyncio.gather(raw("base", request), processed("base", request))
    assert ours.sequences == tempered.sequences


async def test_greedy_logprobs_are_raw_in_both_also_beside_other_temperatures(processed: Sampler) -> None:
    greedy = ask(PROMPT, max_tokens=8, temperature=0)
    others = [ask(prompt_of(9), max_tokens=24, temperature=TEMPERATURE, top_k=5) for _ in range(4)]
    alone = await processed("base", greedy)
    beside, *_ = await asyncio.gather(*(processed("base", request) for request in (greedy, *others)))
    for output in (alone, beside):
        assert_drawn_from(rows_of(processed, output.sequences[0]), output.sequences[0])


async def test_tokens_that_top_k_excludes_are_no_part_of_processed_logprobs(processed: Sampler) -> None:
    request = ask(PROMPT, max_tokens=8, temperature=TEMPERATURE, top_k=3, topk_sample_logprobs=5)
    (sequence,) = (await processed("base", request)).sequences
    tempered = at_temperature(rows_of(processed, sequence))
    best = tempered.topk(3)
    kept = torch.full_like(tempered, -torch.inf).scatter(1, best.indices, torch.log_softmax(best.values, -1))
    assert_drawn_from(kept, sequence)
    assert [[token for token, _ in row] for row in sequence.topk] == best.indices.tolist()
    np.testing.assert_allclose(
        [[value for _, value in row] for row in sequence.topk], torch.log_softmax(best.values, -1), atol=ATOL
    )


async def test_given_tokens_have_raw_logprobs_in_both_modes(processed: Sampler) -> None:
    """With those, trainer and samplers are compared at start and after each sync."""
    targets = TargetTokens((len(PROMPT) - 1, 1), PROMPT[1:])
    request = ask(
        PROMPT,
        max_tokens=1,
        temperature=TEMPERATURE,
        prompt_logprobs=True,
        topk_prompt_logprobs=4,
        target_prompt_logprobs=targets,
    )
    output = await processed("base", request)
    rows = all_logprobs(reference(processed.facts.directory), PROMPT)
    expected = rows.gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1))[:, 0]
    assert output.prompt_logprobs is not None
    assert output.topk_prompt_logprobs is not None
    assert output.target_prompt_logprobs is not None
    np.testing.assert_allclose(output.prompt_logprobs[1:], expected, atol=ATOL)
    np.testing.assert_allclose(output.target_prompt_logprobs.logprobs, expected, atol=ATOL)
    listed = [[value for _, value in row] for row in output.topk_prompt_logprobs[1:]]
    np.testing.assert_allclose(listed, rows.topk(4).values, atol=ATOL)


@pytest.mark.parametrize("temperature", [TEMPERATURE, 0])
async def test_drawn_alternatives_have_the_logprobs_of_sampled_tokens(
    raw: Sampler, processed: Sampler, temperature: float
) -> None:
    request = ask(PROMPT, max_tokens=1, temperature=temperature, seed=3, prompt_alt_tokens_k=4)
    ours, tempered = await asyncio.gather(raw("base", request), processed("base", request))
    rows = all_logprobs(reference(processed.facts.directory), PROMPT)
    assert ours.prompt_alt_tokens is not None
    assert tempered.prompt_alt_tokens is not None
    drawn = torch.tensor(ours.prompt_alt_tokens.tokens)
    assert torch.equal(drawn, torch.tensor(tempered.prompt_alt_tokens.tokens))
    of_draws = at_temperature(rows) if temperature else rows
    np.testing.assert_allclose(ours.prompt_alt_tokens.logprobs, rows.gather(1, drawn), atol=ATOL)
    np.testing.assert_allclose(tempered.prompt_alt_tokens.logprobs, of_draws.gather(1, drawn), atol=ATOL)


async def test_an_external_server_with_too_small_a_context_is_refused(processing: Served) -> None:
    (url,) = processing.group.urls
    await vllm_servers((url,), 5.0, 2.0, CONTEXT + 1, "processed").ready()
    with pytest.raises(SamplerError, match=r"takes 257 tokens, expected 258 .*--max-model-len 258"):
        await vllm_servers((url,), 5.0, 2.0, CONTEXT + 2, "processed").ready()


async def test_an_external_server_of_the_other_mode_is_refused_with_the_flag_it_needs(
    servers: dict[str, Served], processing: Served
) -> None:
    (raw_url,), (processed_url,) = servers["untied"].group.urls, processing.group.urls
    await vllm_servers((processed_url,), 5.0, 2.0, 2, "processed").ready()
    await vllm_servers((raw_url,), 5.0, 2.0, 2, "raw").ready()
    with pytest.raises(SamplerError, match=r"answers raw logprobs.* --logprobs-mode processed_logprobs"):
        await vllm_servers((raw_url,), 5.0, 2.0, 2, "processed").ready()
    with pytest.raises(SamplerError, match=r"answers processed logprobs.* --logprobs-mode raw_logprobs"):
        await vllm_servers((processed_url,), 5.0, 2.0, 2, "raw").ready()


async def test_an_external_server_that_lists_no_experts_is_refused_for_router_replay(
    servers: dict[str, Served],
) -> None:
    """One that lists them is in test_routed_experts."""
    (url,) = servers["untied"].group.urls
    with pytest.raises(
        SamplerError, match=r"\(router_replay\): start it with --enable-return-routed-experts"
    ):
        await vllm_servers((url,), 5.0, 2.0, 2, router_replay=True).ready()
