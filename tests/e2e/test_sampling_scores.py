"""Scores of prompts, draws and likeliest tokens through the real SDK, against a plain float32 forward."""

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.e2e.support.client import Client, prompt, random_tokens

TOKENS = random_tokens(24, seed=31)
ROWS = len(TOKENS) - 1
ATOL = 1e-4


@pytest.fixture(scope="session")
def model(model_directory: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)


@torch.no_grad()
def logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[len(tokens) - 1, vocabulary]: row i is of what may follow tokens[: i + 1]."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], -1)


def own(model: PreTrainedModel) -> torch.Tensor:
    return logprobs(model, TOKENS).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def sample(client: Client, samples: int = 1, max_tokens: int = 1, **fields: Any) -> types.SampleResponse:
    given = {name: fields.pop(name) for name in ("seed", "temperature") if name in fields}
    params = types.SamplingParams(max_tokens=max_tokens, stop=[], **given)
    return client.base_sampler().sample(prompt(TOKENS), samples, params, **fields).result()


def test_compute_logprobs_scores_the_whole_prompt_or_its_end(client: Client, model: PreTrainedModel) -> None:
    sampler, expected = client.base_sampler(), own(model).tolist()
    whole = sampler.compute_logprobs(prompt(TOKENS)).result()
    assert whole[0] is None
    assert whole[1:] == pytest.approx(expected, abs=ATOL)
    end = sampler.compute_logprobs(prompt(TOKENS), prompt_logprobs_last_n=5).result()
    assert end[:-5] == [None] * (ROWS - 4)
    assert end[-5:] == pytest.approx(expected[-5:], abs=ATOL)


def test_likeliest_tokens_of_prompt_and_samples(client: Client, model: PreTrainedModel) -> None:
    got = sample(client, 2, 6, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2)
    assert got.topk_prompt_logprobs is not None
    assert got.topk_prompt_logprobs[0] is None
    for row, expected in zip(got.topk_prompt_logprobs[1:], logprobs(model, TOKENS), strict=True):
        assert [token for token, _ in row or ()] == expected.topk(3).indices.tolist()
    for sequence in got.sequences:
        rows = logprobs(model, TOKENS + sequence.tokens)[ROWS:]
        assert sequence.topk_logprobs is not None
        values = [[value for _, value in row or ()] for row in sequence.topk_logprobs]
        np.testing.assert_allclose(values, rows.topk(2).values, atol=ATOL)


@pytest.mark.parametrize("sparse", [False, True])
def test_target_prompt_logprobs(client: Client, model: PreTrainedModel, sparse: bool) -> None:
    ids = torch.full((ROWS, 5), -1)
    ids[3] = torch.tensor([7, 7, -1, 0, 9])
    ids[ROWS - 1, 4] = TOKENS[-1]
    whole, part = types.TensorData.from_torch, types.TensorData.from_torch_sparse
    targets = part(ids, pad_value=-1) if sparse else whole(ids)
    got = sample(client, include_prompt_logprobs=True, target_prompt_logprobs=targets).target_prompt_logprobs
    assert got is not None
    assert got.sparse_crow_indices == targets.sparse_crow_indices
    assert (got.sparse_crow_indices is not None) == sparse
    expected = torch.where(ids < 0, 0.0, logprobs(model, TOKENS).gather(1, ids.clamp_min(0)))
    np.testing.assert_allclose(got.to_torch(), expected, atol=ATOL)


def test_prompt_alt_tokens_are_the_same_for_one_seed(client: Client, model: PreTrainedModel) -> None:
    got = sample(client, seed=5, temperature=0.7, prompt_alt_tokens_k=4).prompt_alt_tokens
    again = sample(client, seed=5, temperature=0.7, prompt_alt_tokens_k=4).prompt_alt_tokens
    other = sample(client, seed=6, temperature=0.7, prompt_alt_tokens_k=4).prompt_alt_tokens
    assert got is not None
    tokens = got.tokens.to_torch()
    assert tokens.shape == (ROWS, 4)
    assert tokens.dtype == torch.int64
    np.testing.assert_allclose(got.logprobs.to_torch(), logprobs(model, TOKENS).gather(1, tokens), atol=ATOL)
    assert again is not None
    assert torch.equal(again.tokens.to_torch(), tokens)
    assert other is not None
    assert not torch.equal(other.tokens.to_torch(), tokens)


def test_a_seed_of_64_bits_is_taken_modulo_2_to_the_63(client: Client) -> None:
    def tokens(seed: int) -> list[list[int]]:
        return [sequence.tokens for sequence in sample(client, 2, 8, seed=seed).sequences]

    assert tokens(2**64 - 1) == tokens(-1) == tokens(2**63 - 1)
    assert tokens(2**63 + 5) == tokens(5) != tokens(6)


def test_absent_max_tokens_fills_the_context(client: Client) -> None:
    with pytest.raises(tinker.BadRequestError) as refusal:
        sample(client, max_tokens=10**6)
    context = int(str(refusal.value).split(" > ")[1].split()[0])
    tokens = random_tokens(context - 50, seed=78)
    response = client.base_sampler().sample(prompt(tokens), 1, types.SamplingParams(stop=[])).result()
    assert len(response.sequences[0].tokens) == 50


def test_cached_prompt_tokens_are_counted(client: Client) -> None:
    tokens, params = random_tokens(300, seed=77), types.SamplingParams(max_tokens=1)
    sampler = client.base_sampler()
    counts = [sampler.sample(prompt(tokens), 2, params).result().prompt_cache_hit_tokens for _ in range(2)]
    assert counts[0] == 0
    assert 0 < counts[1] < 300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs is 1000000, expected 0 to"),
        (
            {"target_prompt_logprobs": types.TensorData.from_torch(torch.full((ROWS, 1), -1))},
            "names no token",
        ),
        (
            {"target_prompt_logprobs": types.TensorData.from_torch(torch.ones((2, 1), dtype=torch.int64))},
            r"shape is \[2, 1\], expected \[23, K\]",
        ),
        ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 24}, "prompt_logprobs_last_n is 24"),
    ],
)
def test_impossible_scores_are_refused_at_once(client: Client, fields: Any, message: str) -> None:
    with pytest.raises(tinker.BadRequestError, match=message):
        sample(client, **fields)
