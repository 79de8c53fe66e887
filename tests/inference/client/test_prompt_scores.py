"""Scores of prompts and likeliest tokens, against a plain float32 forward."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from skyrl_tinker.domain.samples import SampleOutput, SampleRequest, TargetTokens, TopkRow
from skyrl_tinker.errors import UserError
from tests.inference.support.samplers import (
    Sampler,
    all_logprobs,
    ask,
    prompt_of,
    publish_and_load,
    random_adapter,
    reference,
    unique,
)

VOCABULARY = 512
ATOL = 1e-4


def assert_top(rows: tuple[TopkRow, ...], expected: torch.Tensor, k: int) -> None:
    """Exactly the k most likely of each row of `expected`, the most likely first; near ties in any order."""
    tokens = torch.tensor([[token for token, _ in row] for row in rows])
    logprobs = np.array([[value for _, value in row] for row in rows])
    assert all(len({*row}) == k for row in tokens.tolist())
    assert (np.diff(logprobs) <= 0).all()
    np.testing.assert_allclose(logprobs, expected.gather(1, tokens), atol=ATOL)
    np.testing.assert_allclose(logprobs, expected.topk(k).values, atol=ATOL)


def dense_targets(rows: int, width: int, seed: int) -> TargetTokens:
    """Some tokens twice in a row, some cells empty."""
    tokens = np.random.default_rng(seed).integers(-1, 30, (rows, width))
    tokens[:, 1] = tokens[:, 0]
    return TargetTokens((rows, width), tuple(tokens.ravel().tolist()))


def assert_targets(output: SampleOutput, targets: TargetTokens, expected: torch.Tensor) -> None:
    assert output.target_prompt_logprobs is not None
    assert output.target_prompt_logprobs.targets == targets
    tokens = torch.tensor(targets.tokens)
    if targets.crow is None:
        rows = torch.arange(targets.shape[0]).repeat_interleave(targets.shape[1])
    else:
        rows = torch.arange(targets.shape[0]).repeat_interleave(torch.tensor(targets.crow).diff())
    values = torch.where(tokens < 0, 0.0, expected[rows, tokens.clamp_min(0)])
    np.testing.assert_allclose(output.target_prompt_logprobs.logprobs, values, atol=ATOL)


@pytest.mark.parametrize("k", [1, 3, VOCABULARY - 1])
async def test_likeliest_prompt_tokens_are_exactly_k_and_sorted(each_sampler: Sampler, k: int) -> None:
    """The prompt is random, so that its own tokens are mostly not among them."""
    prompt = prompt_of(20)
    output = await each_sampler("base", ask(prompt, max_tokens=1, topk_prompt_logprobs=k))
    assert output.topk_prompt_logprobs is not None
    assert output.topk_prompt_logprobs[0] == ()
    expected = all_logprobs(reference(each_sampler.facts.directory), prompt)
    assert_top(output.topk_prompt_logprobs[1:], expected, k)
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("k", [1, 4, VOCABULARY - 1])
async def test_likeliest_sampled_tokens_are_exactly_k_and_sorted(sampler: Sampler, k: int) -> None:
    prompt = prompt_of(9)
    output = await sampler("base", ask(prompt, num_samples=2, max_tokens=12, topk_sample_logprobs=k))
    model = reference(sampler.facts.directory)
    for sequence in output.sequences:
        expected = all_logprobs(model, prompt + sequence.tokens)[len(prompt) - 1 :]
        assert_top(sequence.topk, expected, k)
        own = expected.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(sequence.logprobs, own, atol=ATOL)


async def test_only_the_last_n_prompt_tokens_are_scored(sampler: Sampler) -> None:
    prompt = prompt_of(20)
    request = ask(
        prompt, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=3
    )
    output = await sampler("base", request)
    assert output.prompt_logprobs is not None
    assert output.topk_prompt_logprobs is not None
    expected = all_logprobs(reference(sampler.facts.directory), prompt)[-3:]
    own = expected.gather(1, torch.tensor(prompt[-3:])[:, None])[:, 0]
    assert np.isnan(output.prompt_logprobs[:-3]).all()
    np.testing.assert_allclose(output.prompt_logprobs[-3:], own, atol=ATOL)
    assert set(output.topk_prompt_logprobs[:-3]) == {()}
    assert_top(output.topk_prompt_logprobs[-3:], expected, 2)


async def test_all_scores_of_one_request_come_together(sampler: Sampler) -> None:
    prompt, targets = prompt_of(40), dense_targets(39, 3, seed=1)
    request = ask(
        prompt,
        num_samples=3,
        prompt_logprobs=True,
        topk_prompt_logprobs=5,
        topk_sample_logprobs=2,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=2,
        stop=("never said",),
    )
    output = await sampler("base", request)
    expected = all_logprobs(reference(sampler.facts.directory), prompt)
    assert output.prompt_logprobs is not None
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    np.testing.assert_allclose(output.prompt_logprobs[1:], own, atol=ATOL)
    assert_top((output.topk_prompt_logprobs or ())[1:], expected, 5)
    assert_targets(output, targets, expected)
    assert_draws(output, expected, 2)
    assert [len(sequence.topk) for sequence in output.sequences] == [
        len(sequence.tokens) for sequence in output.sequences
    ]


async def test_long_prompts_are_scored_with_and_without_adapters_in_one_batch(
    each_sampler: Sampler, tmp_path: Path
) -> None:
    """More prompt tokens than one step takes, so that prompts are scored in chunks, beside ones that
    generate; the adapter changes lm_head, too."""
    directory, name = each_sampler.facts.directory, unique(tmp_path)
    adapter = random_adapter(directory, 8, seed=5)
    await publish_and_load(each_sampler, adapter, tmp_path, name)
    models = {"base": reference(directory), name: reference(directory, adapter)}
    prompts = [prompt_of(255 - index % 3, seed=index) for index in range(20)]
    targets = [dense_targets(len(prompt) - 1, 3, seed=index) for index, prompt in enumerate(prompts)]
    names = ["base", name] * 10
    requests = [
        ask(
            prompt,
            max_tokens=1,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            target_prompt_logprobs=each,
            prompt_alt_tokens_k=1,
        )
        for prompt, each in zip(prompts, targets, strict=True)
    ]
    generating = asyncio.gather(*(each_sampler(name, ask(prompt_of(5), max_tokens=40)) for _ in range(3)))
    outputs = await asyncio.gather(*map(each_sampler, names, requests))
    await generating
    for model, prompt, each, output in zip(names, prompts, targets, outputs, strict=True):
        expected = all_logprobs(models[model], prompt)
        own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        np.testing.assert_allclose((output.prompt_logprobs or ())[1:], own, atol=ATOL)
        assert_top((output.topk_prompt_logprobs or ())[1:], expected, 2)
        assert_targets(output, each, expected)
        assert_draws(output, expected, 1)


async def test_sparse_targets_keep_their_cells(sampler: Sampler) -> None:
    prompt = prompt_of(6)
    targets = TargetTokens((5, 400), (7, -1, 7, 511, 0), (0, 0, 0, 3, 3, 5), (1, 2, 399, 0, 5))
    output = await sampler("base", ask(prompt, max_tokens=1, target_prompt_logprobs=targets))
    assert_targets(output, targets, all_logprobs(reference(sampler.facts.directory), prompt))


def assert_draws(output: SampleOutput, expected: torch.Tensor, k: int) -> None:
    """`expected`: raw logprobs [rows, vocabulary], whatever the temperature of the draws."""
    draws = output.prompt_alt_tokens
    assert draws is not None
    tokens = torch.tensor(draws.tokens)
    assert tokens.shape == (len(expected), k)
    np.testing.assert_allclose(draws.logprobs, expected.gather(1, tokens), atol=ATOL)


def drawn(prompt: tuple[int, ...], k: int, **params: object) -> SampleRequest:
    return ask(prompt, max_tokens=1, prompt_alt_tokens_k=k, **params)


@pytest.mark.parametrize("temperature", [1.0, 0.4])
async def test_draws_follow_the_models_distribution_at_the_temperature(
    sampler: Sampler, temperature: float
) -> None:
    """Chi-square per position over the tokens that are expected ten times, the others together."""
    k, prompt = 1000, prompt_of(5)
    output = await sampler("base", drawn(prompt, k, seed=1, temperature=temperature, top_k=1, top_p=0.1))
    logprobs = all_logprobs(reference(sampler.facts.directory), prompt)
    assert_draws(output, logprobs, k)
    assert output.prompt_alt_tokens is not None
    for row, tokens in zip(logprobs, output.prompt_alt_tokens.tokens, strict=True):
        mean = k * torch.softmax(row / temperature, -1).double().numpy()
        counts = np.bincount(tokens, minlength=VOCABULARY)
        often = mean >= 10
        seen = np.append(counts[often], counts[~often].sum())
        wanted = np.append(mean[often], mean[~often].sum())
        degrees = len(seen) - 1
        statistic = ((seen - wanted) ** 2 / wanted).sum()
        assert abs(statistic - degrees) < 4 * (2 * degrees) ** 0.5  # mean and deviation of chi-square


async def test_draws_differ_by_position_and_seed_but_not_by_what_shares_the_batch(sampler: Sampler) -> None:
    prompt = (7,) * 60
    alone = await sampler("base", drawn(prompt, 4, seed=3))
    crowd = [sampler("base", drawn(prompt_of(200, seed=index), 4, seed=3)) for index in range(20)]
    beside, *_ = await asyncio.gather(sampler("base", drawn(prompt, 4, seed=3)), *crowd)
    other = await sampler("base", drawn(prompt, 4, seed=4))
    unseeded = [await sampler("base", drawn(prompt, 4)) for _ in range(2)]
    assert alone.prompt_alt_tokens is not None
    assert alone.prompt_alt_tokens.tokens == beside.prompt_alt_tokens.tokens  # type: ignore[union-attr]
    assert len({each.prompt_alt_tokens for each in (alone, other, *unseeded)}) == 4
    assert len(set(alone.prompt_alt_tokens.tokens)) > 50


async def test_draws_at_temperature_zero_are_the_likeliest_token(sampler: Sampler) -> None:
    prompt = prompt_of(12)
    output = await sampler("base", drawn(prompt, 3, temperature=0.0))
    best = all_logprobs(reference(sampler.facts.directory), prompt).argmax(-1).tolist()
    assert output.prompt_alt_tokens is not None
    assert output.prompt_alt_tokens.tokens == tuple((token,) * 3 for token in best)


async def test_a_prompt_of_one_token_has_nothing_to_score(sampler: Sampler) -> None:
    output = await sampler("base", drawn((5,), 3, topk_prompt_logprobs=2, prompt_logprobs=True))
    assert output.prompt_alt_tokens is not None
    assert (output.prompt_alt_tokens.k, output.prompt_alt_tokens.tokens) == (3, ())
    assert output.topk_prompt_logprobs == ((),)
    assert np.isnan(output.prompt_logprobs).all()  # type: ignore[arg-type]


async def test_scores_survive_an_abort(sampler: Sampler) -> None:
    prompt, targets = prompt_of(200), dense_targets(199, 3, seed=1)
    request = ask(
        prompt, num_samples=2, max_tokens=50, target_prompt_logprobs=targets, topk_sample_logprobs=2
    )
    sampling = asyncio.create_task(sampler("base", request))
    for _ in range(5):
        await sampler.client.control.pause("abort")
        await sampler.client.control.resume()
        await asyncio.sleep(0.1)
    output = await sampling
    model = reference(sampler.facts.directory)
    assert_targets(output, targets, all_logprobs(model, prompt))
    for sequence in output.sequences:
        assert_top(sequence.topk, all_logprobs(model, prompt + sequence.tokens)[len(prompt) - 1 :], 2)


async def test_cached_prompt_tokens_are_counted_once_whatever_the_number_of_samples(sampler: Sampler) -> None:
    prompt = prompt_of(200, seed=99)
    assert (await sampler("base", ask(prompt, num_samples=4))).cached_tokens == 0
    assert (await sampler("base", ask(prompt, num_samples=4))).cached_tokens == 128
    assert (await sampler("base", ask(prompt))).cached_tokens == 128
    assert (await sampler("base", ask(prompt, max_tokens=1, prompt_logprobs=True))).cached_tokens == 0


async def test_too_many_columns_of_vllms_own_are_a_user_error(sampler: Sampler) -> None:
    with pytest.raises(UserError, match="513"):
        await sampler("base", ask(prompt_of(3), topk_prompt_logprobs=513))
