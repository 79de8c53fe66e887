"""Stop conditions, seeds, numbers of samples and refusals, against a real server."""

import asyncio
import pickle
from dataclasses import replace

import pytest

from skyrl_tinker.errors import NotFoundError, SamplerError, UserError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from tests.inference.support.samplers import CONTEXT, Sampler, ask, assert_same_logprobs, prompt_of, reference
from tests.support.sampler_clients import vllm_client

GREEDY = {"temperature": 0.0, "max_tokens": 12}


async def greedy_tokens(sampler: Sampler, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return (await sampler("base", ask(prompt, **GREEDY))).sequences[0].tokens


async def test_a_stop_token_ends_the_sequence_and_stays_in_it(sampler: Sampler) -> None:
    prompt = prompt_of(9)
    tokens = await greedy_tokens(sampler, prompt)
    stop = tokens[4]
    output = await sampler("base", ask(prompt, stop=(stop,), **GREEDY))
    expected = tokens[: tokens.index(stop) + 1]
    assert output.sequences[0].tokens == expected
    assert len(output.sequences[0].logprobs) == len(expected)
    assert output.sequences[0].stop_reason == "stop"
    assert_same_logprobs(output, reference(sampler.facts.directory), prompt)


@pytest.mark.parametrize("stop", [None, (511,), ("never said",)])
async def test_eos_ends_a_sequence_unless_stop_is_empty(sampler: Sampler, stop: object) -> None:
    prompt = prompt_of(9)
    tokens = await greedy_tokens(sampler, prompt)
    eos = Sampler(sampler.client, replace(sampler.facts, eos_token_ids=(509, tokens[3])))
    sequence = (await eos("base", ask(prompt, stop=stop, **GREEDY))).sequences[0]
    assert sequence.stop_reason == "stop"
    assert sequence.tokens == tokens[: tokens.index(tokens[3]) + 1]


async def test_an_empty_stop_list_runs_through_eos(sampler: Sampler) -> None:
    prompt = prompt_of(9)
    tokens = await greedy_tokens(sampler, prompt)
    eos = Sampler(sampler.client, replace(sampler.facts, eos_token_ids=tokens[3:4]))
    sequence = (await eos("base", ask(prompt, stop=(), **GREEDY))).sequences[0]
    assert (sequence.tokens, sequence.stop_reason) == (tokens, "length")


async def test_a_stop_string_ends_the_sequence(sampler: Sampler) -> None:
    """One random sample that says "e" somewhere is enough; a random model says it soon."""
    request = ask(prompt_of(9), num_samples=8, max_tokens=200, stop=("e",), seed=1)
    sequences = (await sampler("base", request)).sequences
    stopped = [sequence for sequence in sequences if sequence.stop_reason == "stop"]
    assert stopped
    assert all(len(sequence.tokens) < 200 for sequence in stopped)
    assert all(len(sequence.tokens) == len(sequence.logprobs) for sequence in sequences)


async def test_a_seed_gives_the_same_sample_and_sample_i_has_seed_plus_i(sampler: Sampler) -> None:
    prompt = prompt_of(6)
    together = (await sampler("base", ask(prompt, num_samples=3, seed=41))).sequences
    again = (await sampler("base", ask(prompt, num_samples=3, seed=41))).sequences
    alone = [(await sampler("base", ask(prompt, seed=41 + index))).sequences[0] for index in range(3)]
    assert [sequence.tokens for sequence in together] == [sequence.tokens for sequence in again]
    assert [sequence.tokens for sequence in together] == [sequence.tokens for sequence in alone]
    assert len({sequence.tokens for sequence in together}) == 3


async def test_a_seeded_sample_does_not_depend_on_how_its_prompt_is_cut(sampler: Sampler) -> None:
    """One step takes 2048 tokens: of 20 prompts some are cut."""
    requests = [ask(prompt_of(240, seed=index), seed=index) for index in range(20)]
    together = await asyncio.gather(*(sampler("base", request) for request in requests))
    alone = [await sampler("base", request) for request in requests]
    assert [each.sequences[0].tokens for each in together] == [each.sequences[0].tokens for each in alone]


async def test_seeds_wrap_around_at_63_bits(sampler: Sampler) -> None:
    prompt, last = prompt_of(6), (1 << 63) - 1
    wrapped = (await sampler("base", ask(prompt, num_samples=3, seed=last))).sequences
    zero = (await sampler("base", ask(prompt, num_samples=2, seed=0))).sequences
    alone = (await sampler("base", ask(prompt, seed=last))).sequences[0]
    assert [sequence.tokens for sequence in wrapped[1:]] == [sequence.tokens for sequence in zero]
    assert wrapped[0].tokens == alone.tokens


async def test_without_a_seed_samples_differ(sampler: Sampler) -> None:
    outputs = await asyncio.gather(*(sampler("base", ask(prompt_of(6), num_samples=2)) for _ in range(2)))
    assert len({sequence.tokens for output in outputs for sequence in output.sequences}) == 4


async def test_temperature_zero_gives_the_same_sequence_num_samples_times(sampler: Sampler) -> None:
    output = await sampler("base", ask(prompt_of(6), num_samples=4, temperature=0.0))
    assert len(output.sequences) == 4
    assert len(set(output.sequences)) == 1


async def test_absent_max_tokens_fills_the_context(sampler: Sampler) -> None:
    prompt = prompt_of(CONTEXT - 40)
    output = await sampler("base", ask(prompt, max_tokens=None))
    assert len(output.sequences[0].tokens) == 40
    assert output.sequences[0].stop_reason == "length"
    with pytest.raises(UserError, match="256 prompt tokens leave nothing of a context of 256"):
        await sampler("base", ask(prompt_of(CONTEXT), max_tokens=None))


async def test_what_vllm_refuses_is_a_user_error_with_its_text(sampler: Sampler) -> None:
    with pytest.raises(UserError, match="512"):
        await sampler("base", ask((1, 2, 512)))


async def test_an_adapter_that_is_not_loaded_is_not_found(sampler: Sampler) -> None:
    with pytest.raises(NotFoundError, match="v999"):
        await sampler("v999", ask(prompt_of(4)))


async def test_the_base_model_answers_to_its_own_names(sampler: Sampler) -> None:
    assert (await sampler("tiny", ask(prompt_of(4)))).sequences


async def test_a_pickled_client_samples(sampler: Sampler) -> None:
    await sampler.client.control.health()
    copy: RemoteInferenceClient = pickle.loads(pickle.dumps(sampler.client))
    assert (await Sampler(copy, sampler.facts)("base", ask(prompt_of(4)))).sequences
    await copy.close()


async def test_an_unreachable_server_is_a_sampler_error(sampler: Sampler) -> None:
    client = vllm_client("http://127.0.0.1:9", ("http://127.0.0.1:9",))
    with pytest.raises(SamplerError, match=r"127\.0\.0\.1:9"):
        await Sampler(client, sampler.facts)("base", ask(prompt_of(4)))
    await client.close()
