"""The same policy at several moments: what each would say of a sequence that was sampled across them."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import tinker
from tinker import types

from tests.e2e.support.client import Array, Client, logprobs_of, prompt, random_tokens, train

TOKENS = random_tokens(40, seed=31)
START = TOKENS[:8]
ATOL = 1e-3
FEW = 20
"""Tokens of a rollout that shows that others, asked for before it, are under way."""


def step(training: tinker.TrainingClient) -> None:
    """Enough that nearly every logprob moves visibly."""
    train(training, TOKENS, 1e-3 if training.get_info().lora_rank == 0 else 3e-2)


def policy(client: Client, *, rank: int, steps: int) -> tinker.TrainingClient:
    """Always the same one for the same arguments."""
    training = client.new_lora(rank=rank, seed=5)
    for _ in range(steps):
        step(training)
    return training


def roll(
    sampler: tinker.SamplingClient, tokens: int, *, samples: int = 1, seed: int | None = None
) -> "Future[types.SampleResponse]":
    params = types.SamplingParams(max_tokens=tokens, seed=seed, stop=[])
    return sampler.sample(prompt(START), samples, params).future()


def begin(
    sampler: tinker.SamplingClient, tokens: int, *, samples: int = 1, seed: int | None = None
) -> "Future[types.SampleResponse]":
    """Roll; returns when it is under way: a short rollout that was asked for after it has ended."""
    rolling = roll(sampler, tokens, samples=samples, seed=seed)
    roll(sampler, FEW).result()
    return rolling


def scores(training: tinker.TrainingClient, tokens: Sequence[int]) -> Array:
    """[len(tokens)], of tokens that follow START."""
    return logprobs_of(training, [*START, *tokens])[len(START) - 1 :]


def switches(sequence: types.SampledSequence, policies: Sequence[tinker.TrainingClient]) -> list[int]:
    """Where each next policy took over, one after the other; AssertionError if no such places exist."""
    sampled = np.asarray(sequence.logprobs)
    agree = [np.abs(scores(each, sequence.tokens) - sampled) < ATOL for each in policies]
    places, at = [], 0
    for now in agree[:-1]:
        at += int(np.argmin(now[at:])) if not now[at:].all() else len(now) - at
        places.append(at)
    assert agree[-1][at:].all(), f"neither policy explains the token after {places}"
    return places
