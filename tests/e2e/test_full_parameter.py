"""Rank 0: every weight trains; samplers serve the base, adapters and several full versions at once."""

import numpy as np
import tinker
from tinker import types

from tests.e2e.support.client import Client, logprobs_of, prompt, random_tokens, train

TOKENS = random_tokens(40, seed=31)


def snapshot(training: tinker.TrainingClient) -> tuple[tinker.SamplingClient, np.ndarray]:
    """A sampling client of the weights as they are now, and their logprobs."""
    return training.save_weights_and_get_sampling_client().result(), logprobs_of(training, TOKENS)


def test_full_parameter_training_learns_and_syncs(client: Client) -> None:
    training = client.new_full()
    before = logprobs_of(training, TOKENS)
    for _ in range(2):
        train(training, TOKENS, 1e-3)
    sampler = training.save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(prompt(TOKENS)).result()
    now = logprobs_of(training, TOKENS)
    assert now.sum() > before.sum() + 1
    np.testing.assert_allclose(scored[1:], now, atol=1e-3)


def test_pinned_versions_base_and_adapters_stay_right_beside_each_other(client: Client) -> None:
    full, lora = client.new_full(), client.new_lora()
    base = client.base_sampler()
    reference = base.compute_logprobs(prompt(TOKENS)).result()
    train(full, TOKENS, 1e-3)
    first, first_logprobs = snapshot(full)
    train(full, TOKENS, 1e-3)
    second, second_logprobs = snapshot(full)
    train(lora, TOKENS, 3e-2)
    adapter, adapter_logprobs = snapshot(lora)
    expected = {
        first: first_logprobs,
        second: second_logprobs,
        adapter: adapter_logprobs,
        base: np.asarray(reference[1:]),
    }
    pending = [(s, s.compute_logprobs(prompt(TOKENS))) for _ in range(3) for s in expected]
    for sampler, answer in pending:
        np.testing.assert_allclose(answer.result()[1:], expected[sampler], atol=1e-3)


def test_full_and_adapter_models_train_in_one_go(client: Client) -> None:
    full, lora = client.new_full(), client.new_lora()
    for training in (full, lora):
        before = logprobs_of(training, TOKENS)
        train(training, TOKENS, 1e-3)
        assert np.abs(logprobs_of(training, TOKENS) - before).max() > 1e-4
    assert full.get_info().is_lora is False


def test_named_full_parameter_weights_are_sampled_by_path(client: Client) -> None:
    full = client.new_full()
    train(full, TOKENS, 1e-3)
    path = full.save_weights_for_sampler("full").result().path
    sampler = client.service.create_sampling_client(model_path=path).result()
    sequence = sampler.sample(prompt(TOKENS[:8]), 1, types.SamplingParams(max_tokens=6, stop=[])).result()
    assert len(sequence.sequences[0].tokens) == 6
