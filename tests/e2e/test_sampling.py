"""What a researcher expects of `sample`."""

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, datum, prompt, random_tokens, train

START = random_tokens(10, seed=11)
IM_START = 1


def sample(sampler: tinker.SamplingClient, count: int = 1, **params: object) -> list[types.SampledSequence]:
    given = types.SamplingParams(**{"max_tokens": 12, **params})  # type: ignore[arg-type]
    return list(sampler.sample(prompt(START), count, given).result().sequences)


def test_every_sampled_token_has_its_logprob(client: Client) -> None:
    for sequence in sample(client.base_sampler(), 3):
        assert len(sequence.tokens) == len(sequence.logprobs)


def test_the_same_seed_gives_the_same_tokens_and_samples_differ(client: Client) -> None:
    sampler = client.base_sampler()
    first = [s.tokens for s in sample(sampler, 3, seed=5, stop=[])]
    assert first == [s.tokens for s in sample(sampler, 3, seed=5, stop=[])]
    assert len({tuple(tokens) for tokens in first}) == 3


def test_sample_i_is_drawn_with_seed_plus_i(client: Client) -> None:
    sampler = client.base_sampler()
    grouped = [s.tokens for s in sample(sampler, 3, seed=20, stop=[])]
    alone = [sample(sampler, 1, seed=20 + i, stop=[])[0].tokens for i in range(3)]
    assert grouped == alone


def test_an_empty_stop_list_runs_to_max_tokens(client: Client) -> None:
    sequence = sample(client.base_sampler(), 1, stop=[], max_tokens=40)[0]
    assert len(sequence.tokens) == 40
    assert sequence.stop_reason == "length"


def test_a_stop_token_stays_in_the_output_with_its_logprob(client: Client) -> None:
    sampler = client.base_sampler()
    free = sample(sampler, 1, seed=9, stop=[], max_tokens=30)[0]
    stop = free.tokens[7]
    stopped = sample(sampler, 1, seed=9, stop=[stop], max_tokens=30)[0]
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]


def test_the_text_of_a_special_token_stops_a_sequence(client: Client) -> None:
    sampler = client.base_sampler()
    free = sample(sampler, 128, seed=100, max_tokens=60)
    index, tokens = next((i, s.tokens) for i, s in enumerate(free) if IM_START in s.tokens)
    for stop in (["<|im_start|>"], ["zzz", "im_start|>"]):
        (stopped,) = sample(sampler, 1, seed=100 + index, stop=stop, max_tokens=60)
        assert (stopped.tokens, stopped.stop_reason) == (tokens[: tokens.index(IM_START) + 1], "stop")


def test_a_group_larger_than_the_samplers_batch_comes_back_whole(client: Client) -> None:
    sequences = sample(client.base_sampler(), 300, max_tokens=2, stop=[])
    assert [len(sequence.tokens) for sequence in sequences] == [2] * 300


def test_greedy_samples_are_copies(client: Client) -> None:
    first, second = sample(client.base_sampler(), 2, temperature=0.0)
    assert first.tokens == second.tokens


def test_too_long_a_request_is_refused_at_once_with_the_numbers(client: Client) -> None:
    with pytest.raises(tinker.BadRequestError, match=r"10 prompt tokens \+ 100000 max_tokens > \d+"):
        sample(client.base_sampler(), 1, max_tokens=100_000)


def test_an_unknown_base_model_is_refused_by_name(client: Client) -> None:
    with pytest.raises(tinker.BadRequestError, match="no-such-model"):
        client.service.create_sampling_client(base_model="no-such-model").result()


def test_sampling_goes_on_while_a_long_training_pass_runs(client: Client) -> None:
    import time

    training, sampler = client.new_lora(), client.base_sampler()
    sample(sampler)
    long_pass = training.forward_backward(
        [datum(random_tokens(500, seed=i)) for i in range(60)], "cross_entropy"
    )
    finished: list[float] = []
    while not long_pass.future().done():
        sample(sampler, 1, max_tokens=4)
        finished.append(time.monotonic())
    long_pass.result()
    assert len(finished) >= 3, "no sample finished while the pass ran"


def test_many_samples_at_once_all_come_back(client: Client) -> None:
    sampler = client.base_sampler()
    params = types.SamplingParams(max_tokens=8, stop=[])
    pending = [sampler.sample(prompt(random_tokens(8, seed=i)), 1, params) for i in range(64)]
    lengths = np.array([len(p.result().sequences[0].tokens) for p in pending])
    assert (lengths == 8).all()


def test_a_diverged_model_leaves_nothing_in_the_cache_of_others(client: Client) -> None:
    diverged = client.new_lora()
    train(diverged, START, learning_rate=1e30)
    sampler = diverged.save_weights_and_get_sampling_client().result()
    with pytest.raises(tinker.RequestFailedError, match="diverged"):
        sample(sampler, 4, stop=[])
    base = client.base_sampler()
    params = types.SamplingParams(max_tokens=5, stop=[])
    pending = [base.sample(prompt(random_tokens(20, seed=seed)), 1, params) for seed in range(40)]
    for each in pending:
        assert max(each.result().sequences[0].logprobs) <= 0
