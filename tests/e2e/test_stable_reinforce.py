"""Training on what a recording client sampled, named by provenance spans, with the real SDK."""

import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Array, Client, datum, logprobs_of, prompt, random_tokens, train

PROMPT = random_tokens(6, seed=11)
MORE = random_tokens(3, seed=12)
PROBE = random_tokens(24, seed=13)
Spans = types.ProvenanceSpans


def draw(sampler: tinker.SamplingClient, tokens: Sequence[int], seed: int = 5) -> types.SampledSequence:
    params = types.SamplingParams(max_tokens=8, seed=seed, stop=[])
    return sampler.sample(prompt(tokens), 1, params).result().sequences[0]


def of_prompt(sequence_id: str, offset: int, length: int) -> types.PromptProvenanceSpan:
    return types.PromptProvenanceSpan(sequence_id=sequence_id, offset=offset, length=length)


def of_sample(sequence_id: str, length: int) -> types.SampledProvenanceSpan:
    return types.SampledProvenanceSpan(sequence_id=sequence_id, length=length)


def stable(tokens: Sequence[int], advantages: Array, inputs: Spans, targets: Spans) -> types.Datum:
    return datum(tokens, advantages=advantages).with_provenance(model_input=inputs, loss_fn_inputs=targets)


def one_turn(
    sequence: types.SampledSequence, *, tokens: Sequence[int] | None = None, name: str | None = None
) -> types.Datum:
    """PROMPT and what was sampled for it, advantages 1 and -1 in turn; `tokens` and `name`: in place of its
    own."""
    sampled, sequence_id = list(tokens or sequence.tokens), name or sequence.sequence_id
    before = len(PROMPT)
    return stable(
        [*PROMPT, *sampled],
        _advantages(before - 1, len(sampled)),
        [of_prompt(sequence_id, 0, before), of_sample(sequence_id, len(sampled) - 1)],
        [of_prompt(sequence_id, 1, before - 1), of_sample(sequence_id, len(sampled))],
    )


def _advantages(*lengths: int) -> Array:
    """0 for the parts at even places, which are prompts; 1 and -1 in turn for the others."""
    parts = [np.where(np.arange(length) % 2, -1.0, 1.0) * (i % 2) for i, length in enumerate(lengths)]
    return np.concatenate(parts).astype(np.float32)


def step(training: tinker.TrainingClient, data: list[types.Datum], loss_fn: str, **config: float) -> Array:
    """One optimizer step; the logprobs of PROBE after it."""
    backward = training.forward_backward(data, loss_fn, config)  # type: ignore[arg-type]
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
    backward.result()
    stepped.result()
    return logprobs_of(training, PROBE)


@pytest.fixture(scope="module")
def recording(client: Client) -> tinker.SamplingClient:
    """Samples from the base model, in the session of `client`."""
    return client.service.create_sampling_client(base_model=client.model, record_stability_info=True).result()


def test_on_policy_it_is_reinforce(client: Client, recording: tinker.SamplingClient) -> None:
    """So one step equals one of importance_sampling, whose ratio is 1 there, with the same logprobs."""
    sequence = draw(recording, PROMPT)
    named = one_turn(sequence)
    before = len(PROMPT) - 1
    told = datum(
        [*PROMPT, *sequence.tokens],
        advantages=_advantages(before, len(sequence.tokens)),
        logprobs=[0.0] * before + list(sequence.logprobs or []),
    )
    start = logprobs_of(client.new_lora(seed=21), PROBE)
    stepped = step(client.new_lora(seed=21), [named], "stable_reinforce", kl_coeff=0.0)
    expected = step(client.new_lora(seed=21), [told], "importance_sampling")
    np.testing.assert_allclose(stepped, expected, atol=1e-5)
    assert np.abs(stepped - start).max() > 1e-2


def test_weights_that_were_trained_are_sampled_recorded_and_trained_again(client: Client) -> None:
    training = client.new_lora(seed=22)
    train(training, PROBE)
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
    sequence = draw(sampler, PROMPT)
    output = training.forward_backward([one_turn(sequence)], "stable_reinforce").result()
    logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(logprobs[len(PROMPT) - 1 :], sequence.logprobs, atol=1e-3)
    assert output.metrics["masked_tokens:sum"] == 0
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()


def test_two_turns_in_one_datum_train_as_the_two_they_are(
    client: Client, recording: tinker.SamplingClient
) -> None:
    first = draw(recording, PROMPT)
    history = [*PROMPT, *first.tokens, *MORE]
    second = draw(recording, history)
    tokens = [*history, *second.tokens]
    lengths = len(PROMPT) - 1, len(first.tokens), len(MORE), len(second.tokens)
    targets: Spans = [
        of_prompt(first.sequence_id, 1, lengths[0]),
        of_sample(first.sequence_id, lengths[1]),
        of_prompt(second.sequence_id, len(PROMPT) + lengths[1], lengths[2]),
        of_sample(second.sequence_id, lengths[3]),
    ]
    inputs: Spans = [
        of_prompt(first.sequence_id, 0, len(PROMPT)),
        *targets[1:3],
        of_sample(second.sequence_id, lengths[3] - 1),
    ]
    named = stable(tokens, _advantages(*lengths), inputs, targets)
    sampled = [list(sequence.logprobs or []) for sequence in (first, second)]
    logprobs = [*[0.0] * lengths[0], *sampled[0], *[0.0] * lengths[2], *sampled[1]]
    told = datum(tokens, advantages=_advantages(*lengths), logprobs=logprobs)
    stepped = step(client.new_lora(seed=23), [named], "stable_reinforce", kl_coeff=0.0)
    expected = step(client.new_lora(seed=23), [told], "importance_sampling")
    np.testing.assert_allclose(stepped, expected, atol=1e-5)


def test_every_sequence_of_a_sample_can_be_trained_also_by_copies_of_the_client(
    client: Client, recording: tinker.SamplingClient
) -> None:
    copy: tinker.SamplingClient = pickle.loads(pickle.dumps(recording))
    drawn = [
        sequence
        for sampler in (recording, copy)
        for temperature in (0.0, 1.0)
        for sequence in sampler.sample(
            prompt(PROMPT), 2, types.SamplingParams(max_tokens=4, seed=3, stop=[], temperature=temperature)
        )
        .result()
        .sequences
    ]
    assert len({sequence.sequence_id for sequence in drawn}) == 8
    training = client.new_lora(seed=24)
    output = training.forward_backward([one_turn(each) for each in drawn], "stable_reinforce").result()
    assert len(output.loss_fn_outputs) == 8


def _unknown(client: Client, sequence: types.SampledSequence) -> types.Datum:
    return one_turn(sequence, name="nobody-0")


def _unrecorded(client: Client, sequence: types.SampledSequence) -> types.Datum:
    return one_turn(draw(client.base_sampler(), PROMPT))


def _other_tokens(client: Client, sequence: types.SampledSequence) -> types.Datum:
    tokens = list(sequence.tokens)
    tokens[2] = (tokens[2] + 1) % 400
    return one_turn(sequence, tokens=tokens)


def _too_long(client: Client, sequence: types.SampledSequence) -> types.Datum:
    return one_turn(sequence, tokens=[*sequence.tokens, 5])


def _foreign(client: Client, sequence: types.SampledSequence) -> types.Datum:
    with tinker.ServiceClient(base_url=client.url) as other:
        sampler = other.create_sampling_client(base_model=client.model, record_stability_info=True).result()
        return one_turn(draw(sampler, PROMPT))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (_unknown, r"\[0\] names sequence 'nobody-0', which is unknown"),
        (_foreign, r"\[0\] names sequence '\w+-0', which is unknown"),
        (_unrecorded, r"\[0\] names sequence '\w+-0', which has no record"),
        (_other_tokens, r"\[1\]: target_tokens\[7\] is \d+, expected \d+, which was sampled as token 2"),
        (_too_long, r"\[1\] covers tokens \[0, 9\) of what was sampled as sequence '\w+-0'"),
    ],
)
def test_a_span_that_is_not_true_fails_its_window_and_nobody_elses(
    client: Client,
    recording: tinker.SamplingClient,
    wrong: Callable[[Client, types.SampledSequence], types.Datum],
    why: str,
) -> None:
    sequence = draw(recording, PROMPT)
    training, neighbour = client.new_lora(seed=25), client.new_lora(seed=25)
    before = logprobs_of(training, PROBE)
    data = [one_turn(sequence), wrong(client, sequence)]
    refused = training.forward_backward(data, "stable_reinforce")
    fine = neighbour.forward_backward([one_turn(sequence)], "stable_reinforce")
    spoiled = training.optim_step(types.AdamParams(learning_rate=1e-2))
    with pytest.raises(tinker.RequestFailedError, match=r"datum 1: loss_fn_input_spans" + why) as failure:
        refused.result()
    assert str(failure.value.category).lower().endswith("user")
    with pytest.raises(tinker.RequestFailedError, match="loss_fn_input_spans"):
        spoiled.result()
    np.testing.assert_array_equal(logprobs_of(training, PROBE), before)
    fine.result()
    neighbour.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    moved = step(training, [one_turn(sequence)], "stable_reinforce")
    np.testing.assert_array_equal(moved, logprobs_of(neighbour, PROBE))
