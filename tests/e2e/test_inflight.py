"""kind="inflight": rollouts go on under the newest weights, from the token at which they are."""

import numpy as np
import pytest
import tinker

from tests.e2e.support.client import Client, logprobs_of, prompt
from tests.e2e.support.policies import ATOL, FEW, START, TOKENS, begin, policy, roll, step, switches

LONG = 700  # tokens: seconds


def publish(training: tinker.TrainingClient) -> tinker.SamplingClient:
    return training.save_weights_and_get_sampling_client(kind="inflight").result()


@pytest.mark.parametrize("rank", [8, 0], ids=["lora", "full"])
def test_a_long_rollout_spans_an_update_of_its_policy(client: Client, rank: int) -> None:
    training = policy(client, rank=rank, steps=1)
    sampler = publish(training)
    step(training)
    rollouts = begin(sampler, LONG, samples=3)
    publish(training)
    assert not rollouts.done()
    sequences = rollouts.result().sequences
    assert [len(sequence.tokens) for sequence in sequences] == [LONG] * 3
    assert len({tuple(sequence.tokens) for sequence in sequences}) == 3
    before = policy(client, rank=rank, steps=1)
    for sequence in sequences:
        (place,) = switches(sequence, [before, training])
        assert 0 < place < LONG


def test_what_was_sampled_before_an_update_is_what_would_have_been_sampled_without_it(client: Client) -> None:
    training = policy(client, rank=8, steps=1)
    pinned = training.save_weights_and_get_sampling_client().result()
    undisturbed = roll(pinned, LONG, samples=2, seed=3)
    sampler = publish(training)
    step(training)
    rollouts = begin(sampler, LONG, samples=2, seed=3)
    publish(training)
    before = policy(client, rank=8, steps=1)
    for sequence, whole in zip(rollouts.result().sequences, undisturbed.result().sequences, strict=True):
        (place,) = switches(sequence, [before, training])
        assert 0 < place < LONG
        assert sequence.tokens[: place - 1] == whole.tokens[: place - 1]
        assert sequence.tokens != whole.tokens


def test_a_rollout_spans_several_updates(client: Client) -> None:
    training = policy(client, rank=8, steps=1)
    sampler = publish(training)
    rollout = roll(sampler, 2 * LONG)
    for _ in range(3):
        roll(sampler, FEW).result()  # the long one goes on beside it
        step(training)
        publish(training)
    assert not rollout.done()
    (sequence,) = rollout.result().sequences
    assert len(sequence.tokens) == 2 * LONG
    places = switches(sequence, [policy(client, rank=8, steps=steps) for steps in (1, 2, 3, 4)])
    assert places == sorted(places)
    assert 0 < places[0] < places[-1] < 2 * LONG


def test_rollouts_of_others_do_not_feel_an_update(client: Client) -> None:
    training = policy(client, rank=8, steps=1)
    pinned = training.save_weights_and_get_sampling_client().result()
    other = publish(policy(client, rank=16, steps=2))
    samplers = [pinned, other, client.base_sampler()]
    undisturbed = [roll(sampler, LONG, seed=1) for sampler in samplers]
    alone = [rollout.result().sequences[0] for rollout in undisturbed]
    publish(training)
    rollouts = [roll(sampler, LONG, seed=1) for sampler in samplers]
    for _ in range(2):
        step(training)
        publish(training)
    for rollout, before in zip(rollouts, alone, strict=True):
        (sequence,) = rollout.result().sequences
        assert sequence.tokens == before.tokens
        np.testing.assert_array_equal(sequence.logprobs, before.logprobs)


@pytest.mark.parametrize("rank", [8, 0], ids=["lora", "full"])
def test_old_and_new_clients_see_the_newest_weights_and_pinned_ones_their_own(
    client: Client, rank: int
) -> None:
    training = policy(client, rank=rank, steps=1)
    base = client.base_sampler()
    base_logprobs = base.compute_logprobs(prompt(TOKENS)).result()[1:]
    first, pinned = publish(training), training.save_weights_and_get_sampling_client().result()
    old = logprobs_of(training, TOKENS)
    step(training)
    second = publish(training)
    new = logprobs_of(training, TOKENS)
    expected = {first: new, second: new, pinned: old, base: np.asarray(base_logprobs)}
    pending = [(sampler, sampler.compute_logprobs(prompt(TOKENS))) for _ in range(2) for sampler in expected]
    for sampler, answer in pending:
        np.testing.assert_allclose(answer.result()[1:], expected[sampler], atol=ATOL)
    assert first._sampling_session_id != second._sampling_session_id


def test_saves_in_a_row_end_on_the_last(client: Client) -> None:
    """Their publications may overtake each other."""
    training = policy(client, rank=8, steps=1)
    saves = []
    for _ in range(4):
        step(training)
        saves.append(training.save_weights_and_get_sampling_client(kind="inflight"))
    samplers = [save.result() for save in saves]
    now = logprobs_of(training, TOKENS)
    for sampler in samplers:
        np.testing.assert_allclose(sampler.compute_logprobs(prompt(TOKENS)).result()[1:], now, atol=ATOL)


def test_a_greedy_rollout_across_an_update_is_told_once_and_copied(client: Client) -> None:
    training = policy(client, rank=8, steps=1)
    params = tinker.SamplingParams(max_tokens=LONG, temperature=0.0, stop=[])
    sampler = publish(training)
    step(training)
    rollouts = sampler.sample(prompt(START), 2, params)
    roll(sampler, FEW).result()  # the long one goes on beside it
    publish(training)
    first, second = rollouts.result().sequences
    assert first.tokens == second.tokens
    (place,) = switches(first, [policy(client, rank=8, steps=1), training])
    assert 0 < place < LONG
