"""Losses, steps and several models at once, through the SDK, against ten-line references."""

from collections.abc import Callable

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, datum, logprobs_of, random_tokens, train

TOKENS = random_tokens(30, seed=21)
OTHER = random_tokens(22, seed=22)

Loss = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

REFERENCES: dict[str, Loss] = {
    "importance_sampling": lambda p, q, a: -np.exp(p - q) * a,
    "ppo": lambda p, q, a: -np.minimum(np.exp(p - q) * a, np.clip(np.exp(p - q), 0.8, 1.2) * a),
    "cispo": lambda p, q, a: -np.clip(np.exp(p - q), 0.0, 4.0) * p * a,
}


def rl_inputs(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(-6, 1.0, count), random.normal(0, 1, count)


@pytest.mark.parametrize("loss_fn", REFERENCES)
def test_each_rl_loss_equals_its_formula(client: Client, loss_fn: str) -> None:
    training = client.new_lora()
    sampled, advantages = rl_inputs(len(TOKENS) - 1)
    row = datum(TOKENS, logprobs=sampled, advantages=advantages)
    output = training.forward_backward([row], loss_fn).result()
    trained = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    expected = REFERENCES[loss_fn](trained, sampled, advantages).sum()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


def test_loss_config_is_used(client: Client) -> None:
    training = client.new_lora()
    sampled, advantages = rl_inputs(len(TOKENS) - 1)
    row = datum(TOKENS, logprobs=sampled, advantages=advantages)
    config = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01}
    narrow = training.forward_backward([row], "ppo", config).result().metrics["loss:sum"]
    wide = training.forward_backward([row], "ppo").result().metrics["loss:sum"]
    assert narrow != pytest.approx(wide, rel=1e-6)


def test_a_custom_loss_of_the_client_equals_the_built_in_one(client: Client) -> None:
    built_in, custom = client.new_lora(), client.new_lora()
    train(built_in, TOKENS)
    custom.forward_backward_custom(
        [datum(TOKENS)], lambda data, logprobs: (-sum(row.sum() for row in logprobs), {})
    ).result()
    custom.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    np.testing.assert_allclose(logprobs_of(custom, TOKENS), logprobs_of(built_in, TOKENS), atol=1e-5)


def test_two_models_trained_interleaved_equal_the_same_two_alone(client: Client) -> None:
    def learn(training: tinker.TrainingClient, tokens: list[int], steps: int) -> None:
        for _ in range(steps):
            train(training, tokens)

    alone = [client.new_lora(rank=4, seed=1), client.new_lora(rank=16, seed=2)]
    for training, tokens in zip(alone, (TOKENS, OTHER), strict=True):
        learn(training, tokens, 3)
    together = [client.new_lora(rank=4, seed=1), client.new_lora(rank=16, seed=2)]
    for _ in range(3):
        passes = [
            t.forward_backward([datum(r)], "cross_entropy")
            for t, r in zip(together, (TOKENS, OTHER), strict=True)
        ]
        steps = [t.optim_step(types.AdamParams(learning_rate=1e-2)) for t in together]
        for pending in (*passes, *steps):
            pending.result()
    for one, other, tokens in zip(alone, together, (TOKENS, OTHER), strict=True):
        np.testing.assert_allclose(logprobs_of(other, tokens), logprobs_of(one, tokens), atol=1e-5)


def test_a_step_without_gradients_changes_nothing_and_says_so(client: Client) -> None:
    training = client.new_lora()
    before = logprobs_of(training, TOKENS)
    metrics = training.optim_step(types.AdamParams(learning_rate=1.0)).result().metrics
    assert metrics is not None
    assert metrics["grad_norm"] == 0
    np.testing.assert_array_equal(logprobs_of(training, TOKENS), before)


def test_optim_step_reports_grad_norm_and_learning_rate(client: Client) -> None:
    training = client.new_lora()
    training.forward_backward([datum(TOKENS)], "cross_entropy").result()
    metrics = training.optim_step(types.AdamParams(learning_rate=3e-3)).result().metrics
    assert metrics is not None
    assert metrics["grad_norm"] > 0
    assert metrics["learning_rate"] == pytest.approx(3e-3)


def test_the_seed_decides_the_adapter(client: Client) -> None:
    def outcome(seed: int) -> np.ndarray:
        training = client.new_lora(seed=seed)
        train(training, TOKENS)
        return logprobs_of(training, TOKENS)

    np.testing.assert_array_equal(outcome(5), outcome(5))
    assert np.abs(outcome(5) - outcome(6)).max() > 1e-7


def test_only_the_named_parts_train(client: Client) -> None:
    """Each part alone moves the policy, and each differently."""
    parts = ("train_mlp", "train_attn", "train_unembed")
    outcomes = []
    for part in parts:
        training = client.new_lora(**{name: name == part for name in parts})
        before = logprobs_of(training, TOKENS)
        train(training, TOKENS)
        outcomes.append(logprobs_of(training, TOKENS))
        assert np.abs(outcomes[-1] - before).max() > 1e-4, part
    assert np.abs(outcomes[0] - outcomes[1]).max() > 1e-4
    assert np.abs(outcomes[1] - outcomes[2]).max() > 1e-4
