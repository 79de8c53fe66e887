"""Trainer, sampler and a plain Hugging Face forward agree."""

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from tests.e2e.support.client import Client, datum, logprobs_of, prompt, random_tokens, train

TOKENS = random_tokens(48, seed=7)


def hugging_face_logprobs(directory: str, tokens: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
    picked = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return picked.numpy()


def sampled_and_trained_logprobs(
    training: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> tuple[np.ndarray, np.ndarray]:
    """The logprobs of 24 sampled tokens, as the sampler and as the trainer give them."""
    start = TOKENS[:12]
    params = types.SamplingParams(max_tokens=24, seed=3, stop=[])
    sequence = sampler.sample(prompt(start), 1, params).result().sequences[0]
    scored = logprobs_of(training, [*start, *sequence.tokens])
    return np.asarray(sequence.logprobs), scored[len(start) - 1 :]


def test_trainer_logprobs_equal_a_plain_hugging_face_forward(client: Client, model_directory: str) -> None:
    scored = logprobs_of(client.new_lora(), TOKENS)
    np.testing.assert_allclose(scored, hugging_face_logprobs(model_directory, TOKENS), atol=1e-4)


def test_base_model_sampler_agrees_with_the_trainer(client: Client) -> None:
    sampled, scored = sampled_and_trained_logprobs(client.new_lora(), client.base_sampler())
    np.testing.assert_allclose(sampled, scored, atol=1e-3)


@pytest.mark.parametrize("unembed", [True, False])
def test_sampler_agrees_with_the_trainer_after_an_adapter_sync(client: Client, unembed: bool) -> None:
    training = client.new_lora(rank=16, train_unembed=unembed)
    before = logprobs_of(training, TOKENS)
    for _ in range(3):
        train(training, TOKENS, 3e-2)
    assert np.abs(logprobs_of(training, TOKENS) - before).max() > 0.1
    sampler = training.save_weights_and_get_sampling_client().result()
    sampled, scored = sampled_and_trained_logprobs(training, sampler)
    np.testing.assert_allclose(sampled, scored, atol=1e-3)


def test_a_sampling_client_keeps_the_snapshot_it_was_made_from(client: Client) -> None:
    training = client.new_lora()
    first = training.save_weights_and_get_sampling_client().result()
    before = first.compute_logprobs(prompt(TOKENS)).result()
    train(training, TOKENS, 5e-2)
    second = training.save_weights_and_get_sampling_client().result()
    again = first.compute_logprobs(prompt(TOKENS)).result()
    moved = second.compute_logprobs(prompt(TOKENS)).result()
    np.testing.assert_allclose(again[1:], before[1:], atol=1e-5)
    assert np.abs(np.subtract(moved[1:], before[1:])).max() > 0.05


def test_prompt_logprobs_have_one_entry_per_token_and_none_first(
    client: Client, model_directory: str
) -> None:
    scored = client.base_sampler().compute_logprobs(prompt(TOKENS)).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], hugging_face_logprobs(model_directory, TOKENS), atol=1e-3)


def test_sum_reduction_over_tokens_and_datums(client: Client) -> None:
    training = client.new_lora()
    rows = [random_tokens(length, seed=length) for length in (5, 9, 30)]
    output = training.forward([datum(row) for row in rows], "cross_entropy").result()
    total = -sum(float(entry["logprobs"].to_numpy().sum()) for entry in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
