"""asample: refusals with their messages, and the stored value."""

from dataclasses import replace
from typing import Any

import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tinker.domain.sampler_abilities import SamplerAbilities
from skyrl_tinker.domain.samples import SampleRequest, SamplingParams, TargetTokens
from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.chats import ChatCompletionRequest
from skyrl_tinker.protocol.schemas.openai import CompletionRequest, FieldError, OpenAIRequest, parse_openai
from skyrl_tinker.protocol.schemas.sampling import AsampleRequest
from skyrl_tinker.protocol.stored_requests import sample_body, sample_from_body
from skyrl_tinker.protocol.validation.limits import Limits
from skyrl_tinker.protocol.validation.sampling import validate_sample

LIMITS = Limits("tiny", vocab_size=10, context_length=8, max_datums=3, max_lora_rank=8)


def validate(prompt: Any = None, params: Any = None, limits: Limits = LIMITS, **fields: Any) -> SampleRequest:
    chunks = [{"tokens": [1, 2, 3]}] if prompt is None else prompt
    body = {
        "sampling_session_id": "s",
        "seq_id": 0,
        "prompt": {"chunks": chunks},
        "sampling_params": params or {},
    }
    return validate_sample(parse(AsampleRequest, {**body, **fields}), limits)


def test_the_bare_form_of_old_sdks_has_the_protocols_defaults() -> None:
    assert validate(prompt_logprobs=None) == SampleRequest((1, 2, 3), 1, SamplingParams(), False)


def test_a_request_of_the_sdk_arrives_as_it_was_built() -> None:
    sent = tinker.types.SampleRequest(
        num_samples=3,
        prompt=tinker.ModelInput.from_ints([1, 2]).append_int(3),
        sampling_params=tinker.SamplingParams(
            max_tokens=5, seed=7, stop=["a", "b"], temperature=0.5, top_k=4, top_p=0.9
        ),
        sampling_session_id="s",
        seq_id=10**18,
        prompt_logprobs=True,
        record_stability_info=True,
    )
    request = parse(AsampleRequest, sent.model_dump(exclude_none=True, mode="json"))
    assert request.seq_id == 10**18
    params = SamplingParams(max_tokens=5, seed=7, stop=("a", "b"), temperature=0.5, top_k=4, top_p=0.9)
    expected = SampleRequest((1, 2, 3), 3, params, True, record_stability_info=True)
    assert validate_sample(request, LIMITS) == expected


@pytest.mark.parametrize(
    ("stop", "stored"), [(None, None), ([], ()), ("ab", ("ab",)), (["a"], ("a",)), ([1, 2], (1, 2))]
)
def test_stop_keeps_its_five_forms(stop: Any, stored: Any) -> None:
    assert validate(params={"stop": stop}).params.stop == stored


@pytest.mark.parametrize(
    ("seed", "stored"), [(0, 0), (2**63, 0), (2**64 - 1, 2**63 - 1), (-1, 2**63 - 1), (None, None)]
)
def test_seeds_are_reduced_to_63_bits(seed: int | None, stored: int | None) -> None:
    assert validate(params={"seed": seed}).params.seed == stored


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "prompt is empty, expected at least one token"),
        ({"prompt": [{"tokens": []}]}, "prompt is empty"),
        ({"prompt": [{"type": "encoded_text"}]}, "prompt chunk 0 has no tokens"),
        (
            {"prompt": [{"tokens": [1]}, {"tokens": [2, 10]}]},
            r"prompt\[2\] is 10, expected a token id in \[0, 10\)",
        ),
        ({"prompt": [{"tokens": [-1]}]}, r"prompt\[0\] is -1, expected a token id in \[0, 10\)"),
        ({"prompt": [{"tokens": [1.5]}]}, "prompt.chunks.0.tokens.0: .*found 1.5"),
        ({"prompt": [{"tokens": [True]}]}, "prompt.chunks.0.tokens.0: .*found True"),
        ({"num_samples": 0}, "num_samples is 0, expected 1 to 4096"),
        ({"num_samples": 10**9}, "num_samples is 1000000000, expected 1 to 4096"),
        ({"seq_id": -1}, "seq_id: .*found -1"),
        ({"seq_id": 2**63}, "seq_id: "),
        ({"params": {"max_tokens": 0}}, "sampling_params.max_tokens: .*greater than or equal to 1, found 0"),
        ({"params": {"max_tokens": 6}}, r"6 max_tokens > 8 \(.* context_length of base model tiny\)$"),
        ({"prompt": [{"tokens": [1] * 8}]}, r"^8 prompt tokens \+ 1 max_tokens > 8"),
        ({"params": {"stop": ""}}, "sampling_params.stop: an empty text, expected at least one character"),
        ({"params": {"stop": ["a", ""]}}, "sampling_params.stop: an empty text"),
        ({"params": {"stop": ["a"] * 1025}}, "sampling_params.stop: 1025 entries, expected at most 1024"),
        ({"params": {"stop": [10]}}, r"stop\[0\] is 10, expected a token id in \[0, 10\)"),
        ({"params": {"stop": ["a", 1]}}, "sampling_params.stop"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(**fields)


LACKING = replace(
    LIMITS, sampler=SamplerAbilities("Plain", 0.01, 2, 8, seed=False, prompt_alt_tokens_k=False)
)
TARGETS = {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"params": {"seed": 0}}, "seed"), ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k")],
)
def test_what_the_sampling_engine_lacks_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    assert validate(**fields)
    with pytest.raises(NotSupportedError, match=f"^{field} is not supported by .* engine, Plain$"):
        validate(limits=LACKING, **fields)


def test_a_temperature_that_the_sampling_engine_would_not_sample_at_is_refused() -> None:
    with pytest.raises(UserError, match=r"^sampling_params.temperature: expected 0 .* least 0.01, found"):
        validate(params={"temperature": 0.009}, limits=LACKING)
    for temperature in (0.0, 0.01):
        assert validate(params={"temperature": temperature}, limits=LACKING)


def test_more_stop_strings_than_the_sampling_engine_takes_are_refused() -> None:
    message = r"^sampling_params.stop: found 3 strings, expected at most 2 for .* engine, Plain$"
    with pytest.raises(UserError, match=message):
        validate(params={"stop": ["a", "b", "c"]}, limits=LACKING)
    assert validate(params={"stop": ["a", "b"]}, limits=LACKING)
    assert validate(params={"stop": [1, 2, 3]}, limits=LACKING)


def test_more_target_scores_than_the_sampling_engine_takes_are_refused() -> None:
    few = TARGETS | {"data": [2, 2]}
    message = r"^target_prompt_logprobs: 5 tokens of prompt and answer x 2 .* = 10, expected at most 8 for"
    with pytest.raises(UserError, match=message):
        validate(target_prompt_logprobs=TARGETS, params={"max_tokens": 2}, limits=LACKING)
    with pytest.raises(UserError, match=r"8 tokens .* x 2 .* = 16"):
        validate(target_prompt_logprobs=TARGETS, limits=LACKING)
    assert validate(target_prompt_logprobs=TARGETS, params={"max_tokens": 1}, limits=LACKING)
    assert validate(target_prompt_logprobs=few, limits=LACKING)


@pytest.mark.parametrize("field", ["base_model", "model_path"])
def test_weights_other_than_the_sampling_sessions_are_refused(field: str) -> None:
    with pytest.raises(UserError, match=f"{field} is 'x', expected none: the sampling session has its own"):
        validate(**{field: "x"})


WRONG: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "Input should be greater than or equal to 0, found -0.1"),
    ("temperature", 2.1, "Input should be less than or equal to 2, found 2.1"),
    ("temperature", float("inf"), "Input should be less than or equal to 2, found inf"),
    ("temperature", float("nan"), "Input should be less than or equal to 2, found nan"),
    ("temperature", True, "Input should be a valid number, found True"),
    ("temperature", "0", "Input should be a valid number, found '0'"),
    ("top_p", True, "Input should be a valid number, found True"),
    ("top_p", 0.0, "Input should be greater than 0, found 0.0"),
    ("top_p", 1.1, "Input should be less than or equal to 1, found 1.1"),
    ("top_k", -2, "Input should be greater than or equal to -1, found -2"),
    ("top_k", 2**31, "Input should be less than or equal to 2147483647, found 2147483648"),
    ("top_k", 1.5, "Input should be a valid integer, found 1.5"),
    ("seed", "x", "Input should be a valid integer, found 'x'"),
    ("seed", 2**64, "Input should be less than or equal to 18446744073709551615, found 18446744073709551616"),
    ("seed", -(2**63) - 1, "Input should be greater than or equal to -9223372036854775808, found -92233720"),
    ("max_tokens", -1, "Input should be greater than or equal to [01], found -1"),
    ("stop", ["a"] * 1025, "1025 entries, expected at most 1024, found"),
    ("stop", ["a", ""], "an empty text, expected at least one character, found"),
]
OPENAI: list[tuple[type[OpenAIRequest], dict[str, Any]]] = [
    (CompletionRequest, {"model": "m", "prompt": "a"}),
    (ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_the_sdk_and_openais_clients_get_the_same_refusal(field: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^sampling_params.{field}: {message}"):
        validate(params={field: value})
    for model, body in OPENAI:
        with pytest.raises(FieldError, match=f"^{field}: {message}") as refused:
            parse_openai(model, {**body, field: value})
        assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "value", "read"),
    [
        ("seed", -1, 2**63 - 1),
        ("seed", 2**64 - 1, 2**63 - 1),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("top_k", 0, -1),
        ("top_k", 2**31 - 1, 2**31 - 1),
        ("temperature", 0.01, 0.01),
        ("temperature", 0, 0),
    ],
)
def test_the_sdk_and_openais_clients_mean_the_same_by_a_value(field: str, value: Any, read: Any) -> None:
    assert getattr(validate(params={field: value}).params, field) == read
    assert [getattr(parse_openai(model, {**body, field: value}), field) for model, body in OPENAI] == [
        read
    ] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [{"type": "image", "data": "aGk=", "format": "png"}]}, "prompt chunk 0 is of kind image"),
        ({"prompt": [{"tokens": [1]}, {"dmel": "aGk="}]}, "prompt chunk 1 is of kind dmel"),
        ({"prompt": [{"location": "x", "format": "png"}]}, "prompt chunk 0 is of kind image_asset_pointer"),
    ],
)
def test_what_is_not_built_yet_is_refused_as_such(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        validate(**fields)


def test_a_full_context_can_be_scored_but_not_continued() -> None:
    full = [{"tokens": [1] * 8}]
    assert len(validate(full, {"max_tokens": 1}, prompt_logprobs=True).prompt) == 8
    with pytest.raises(UserError, match="8 prompt tokens"):
        validate(full, {"max_tokens": 1})
    with pytest.raises(UserError, match="9 prompt tokens"):
        validate([{"tokens": [1] * 9}], {"max_tokens": 1}, prompt_logprobs=True)
    assert validate([{"tokens": [1] * 7}]).params.max_tokens is None


stops = st.one_of(
    st.none(),
    st.lists(st.text(min_size=1), max_size=3).map(tuple),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
)


targets = st.one_of(
    st.none(),
    st.builds(TargetTokens, st.just((2, 2)), st.just((3, -1, 4, 5))),
    st.builds(TargetTokens, st.just((2, 9)), st.just((3,)), st.just((0, 1, 1)), st.just((8,))),
)


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20).map(tuple),
    st.integers(1, 64),
    st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(1, 99),
        seed=st.none() | st.integers(0, 2**63 - 1),
        stop=stops,
        temperature=st.floats(0, 10),
        top_k=st.just(-1) | st.integers(1, 99),
        top_p=st.floats(0.1, 1),
    ),
    st.booleans(),
    targets,
    st.none() | st.integers(1, 9),
)
def test_the_stored_body_reads_back_to_an_equal_request(
    prompt, samples, params, scoring, targets, last_n
) -> None:
    request = SampleRequest(prompt, samples, params, scoring, 3, 4, targets, 5, last_n)
    body = sample_body(request)
    assert sample_from_body(body) == request
    assert sample_body(sample_from_body(body)) == body
