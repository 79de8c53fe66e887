"""The translation of requests, without a server."""

from dataclasses import replace

import pytest

from skyrl_tinker.domain.samples import SampleRequest, SamplingParams
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import SamplerError, UserError
from skyrl_tinker.inference.client.sample_parts import scores_prompt, split
from skyrl_tinker.inference.vllm.vllm_process import kv_bytes, require_memory
from skyrl_tinker.inference.vllm.vllm_requests import body
from skyrl_tinker.inference.vllm.vllm_responses import logprobs_mode, parse
from tests.inference.support.samplers import ask, spec_of

EOS = (2, 1)


def sampling_params(stop: object) -> dict[str, object]:
    request = ask((5, 6), stop=stop)
    params: dict[str, object] = body("base", request, eos=EOS, context=100)["sampling_params"]
    return params


def test_which_tokens_end_a_sequence_is_said_in_full() -> None:
    assert sampling_params(None)["stop_token_ids"] == [2, 1]
    assert sampling_params((7,))["stop_token_ids"] == [2, 1, 7]
    assert "stop_token_ids" not in sampling_params(())
    assert sampling_params(("end",))["stop"] == ["end"]
    assert sampling_params(("end",))["stop_token_ids"] == [2, 1]
    assert all(sampling_params(stop)["ignore_eos"] for stop in (None, (), (7,), ("end",)))


def test_stop_texts_are_looked_for_in_special_tokens_too() -> None:
    """vLLM leaves those out of a text by default: `<|im_end|>` would never match."""
    assert sampling_params(("<|im_end|>",))["skip_special_tokens"] is False


def test_an_absent_seed_stays_unset() -> None:
    params = body("base", ask((5,)), eos=EOS, context=100)["sampling_params"]
    assert "seed" not in params


def test_what_one_answer_holds_is_requested_as_it_is() -> None:
    request = ask((5,), num_samples=5, seed=7)
    (part,) = split(request, context=100)
    assert part is request


def test_seeds_that_wrap_around_are_two_requests() -> None:
    parts = split(ask((5,), num_samples=5, seed=(1 << 63) - 2), context=100)
    assert [(part.params.seed, part.num_samples) for part in parts] == [((1 << 63) - 2, 2), (0, 3)]


def test_experts_of_prompts_count_to_the_size_of_an_answer() -> None:
    request = ask((5,) * 1200, num_samples=8, max_tokens=400)
    assert [part.num_samples for part in split(request, context=2000)] == [8]
    parts = split(replace(request, routed_experts=True), context=2000)
    assert [part.num_samples for part in parts] == [2, 2, 2, 2]
    assert all(part.routed_experts for part in parts)


def test_the_prompt_is_scored_once_with_the_first_sample() -> None:
    scores = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 3}
    parts = split(ask((5, 6), num_samples=5, seed=7, **scores), context=100)
    assert [(part.params.seed, part.num_samples) for part in parts] == [(7, 1), (8, 4)]
    assert [scores_prompt(part) for part in parts] == [True, False]


def test_more_samples_than_vllm_runs_at_once_are_several_requests() -> None:
    parts = split(ask((5,), num_samples=600, seed=7), context=100)
    assert [(part.params.seed, part.num_samples) for part in parts] == [(7, 256), (263, 256), (519, 88)]


def test_prompts_computed_apart_are_requests_of_one_sequence_each() -> None:
    parts = split(ask((5,), num_samples=3, seed=7), context=100, most=1)
    assert [(part.params.seed, part.num_samples) for part in parts] == [(7, 1), (8, 1), (9, 1)]


def test_no_answer_of_vllm_is_so_large_that_it_seems_to_hang() -> None:
    parts = split(ask((5,), num_samples=20, max_tokens=500, seed=7), context=8000)
    assert [(part.params.seed, part.num_samples) for part in parts] == [(7, 8), (15, 8), (23, 4)]
    huge = split(ask((5,), num_samples=2, max_tokens=50_000), context=100_000)
    assert [part.num_samples for part in huge] == [1, 1]


def test_prompt_logprobs_of_an_early_abort_count_as_missing() -> None:
    choice = {"index": 0, "token_ids": [], "logprobs": None, "finish_reason": "abort"}
    payload = {"choices": [choice], "usage": {}, "prompt_logprobs": None}
    for scores in ({"prompt_logprobs": True}, {"prompt_alt_tokens_k": 2}):
        assert not parse(payload, ask((5, 6), **scores)).scored


def test_a_sampler_that_cannot_score_is_named_not_asked_for_ever() -> None:
    choice = {"index": 0, "token_ids": [], "logprobs": None, "finish_reason": "length"}
    payload = {"choices": [choice], "usage": {}}
    with pytest.raises(SamplerError, match="unscored: does it run with skyrl-tinker's vLLM plugin"):
        parse(payload, ask((5, 6), prompt_alt_tokens_k=2))


def test_a_full_prompt_leaves_nothing_to_sample() -> None:
    with pytest.raises(UserError, match="3 prompt tokens leave nothing of a context of 3"):
        body("base", SampleRequest((1, 2, 3), 1, SamplingParams()), eos=EOS, context=3)


def facts(layers: int) -> BaseModelFacts:
    return BaseModelFacts("/nowhere", ("m",), "Qwen3ForCausalLM", 512, 256, layers, 8, 128, 1024, True, EOS)


def test_kv_memory_is_four_contexts_and_at_least_64_mib() -> None:
    assert kv_bytes(facts(1), "float32") == 64 * MiB
    assert kv_bytes(facts(64), "float32") == 4 * 257 * (2 * 64 * 8 * 128 * 4)


def test_a_sampler_that_does_not_fit_is_refused_with_the_numbers(tmp_path: object) -> None:
    spec = spec_of(facts(64), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(
        SamplerError, match=r"\(514 for the KV cache .* 786 for weights, .* but 700 MiB are free"
    ):
        require_memory(spec, available=700 * MiB)


def test_weights_that_give_no_numbers_are_an_error_not_a_sample() -> None:
    """vLLM puts its least logprob in the place of NaN."""
    content = [{"token_id": 0, "logprob": logprob} for logprob in (-1.0, -9999.0)]
    choice = {"index": 0, "token_ids": [0, 0], "logprobs": {"content": content}, "finish_reason": "length"}
    with pytest.raises(UserError, match="not finite numbers: their training has diverged"):
        parse({"choices": [choice], "usage": {}}, ask((5,)))


@pytest.mark.parametrize(
    ("sampled", "second", "mode"),
    [(-0.5, -1.0, "raw"), (0.0, -9999.0, "processed"), (0.0, -90.0, "raw"), (-9999.0, -9999.0, None)],
)
def test_an_answer_tells_the_mode_of_its_logprobs_unless_the_weights_give_no_numbers(
    sampled: float, second: float, mode: str | None
) -> None:
    listed = [{"token_id": 1, "logprob": sampled}, {"token_id": 2, "logprob": second}]
    position = {"token_id": 1, "logprob": sampled, "top_logprobs": listed}
    assert logprobs_mode({"choices": [{"logprobs": {"content": [position]}}]}) == mode
