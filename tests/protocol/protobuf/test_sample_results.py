"""Results of samples, decoded with the SDK's own code."""

import numpy as np
import pytest
import torch
from tinker.proto.response_conv import deserialize_sample_response

from skyrl_tinker.domain.samples import (
    AltTokens,
    SampledSequence,
    SampleOutput,
    TargetLogprobs,
    TargetTokens,
    VersionSpan,
)
from skyrl_tinker.protocol.protobuf import sample_results

NAN = float("nan")
ROWS = (((7, -0.5), (0, -1.5)), ((0, -0.25), (9, -2.0)))
SAMPLE = SampleOutput(
    (
        SampledSequence((1, 70000), (-0.5, -0.25), "stop", ROWS, (VersionSpan("v3", 0, 2),)),
        SampledSequence((3,), (-1.0,), "length"),
    ),
    prompt_logprobs=(NAN, -2.0),
    cached_tokens=16,
    topk_prompt_logprobs=((), *ROWS),
)
PLAIN = SampleOutput(SAMPLE.sequences[1:])
DENSE = TargetLogprobs(TargetTokens((2, 2), (5, -1, 6, 7)), (-0.5, 0.0, -1.0, -1.5))
SPARSE = TargetLogprobs(TargetTokens((3, 4), (5, -1, 6), (0, 2, 2, 3), (0, 3, 1)), (-0.5, 0.0, -1.0))


def test_the_sdk_reads_a_sample() -> None:
    got = deserialize_sample_response(sample_results.encode_sample_response(SAMPLE))
    assert [sequence.tokens for sequence in got.sequences] == [[1, 70000], [3]]
    assert [sequence.logprobs for sequence in got.sequences] == [[-0.5, -0.25], [-1.0]]
    assert [sequence.stop_reason for sequence in got.sequences] == ["stop", "length"]
    assert got.prompt_logprobs == [None, -2.0]
    assert got.prompt_cache_hit_tokens == 16


def test_the_sdk_reads_the_likeliest_tokens_and_none_where_nothing_was_scored() -> None:
    got = deserialize_sample_response(sample_results.encode_sample_response(SAMPLE))
    assert got.topk_prompt_logprobs == [None, *(list(row) for row in ROWS)]
    assert got.sequences[0].topk_logprobs == [list(row) for row in ROWS]
    assert got.sequences[1].topk_logprobs is None


def test_a_prompt_of_one_token_has_one_row_without_scores() -> None:
    output = SampleOutput(PLAIN.sequences, topk_prompt_logprobs=((),))
    assert deserialize_sample_response(
        sample_results.encode_sample_response(output)
    ).topk_prompt_logprobs == [None]


def test_what_was_not_asked_for_is_absent() -> None:
    body = sample_results.encode_sample_response(PLAIN)
    got = deserialize_sample_response(body)
    assert got.prompt_logprobs is None
    assert got.topk_prompt_logprobs is None
    assert got.target_prompt_logprobs is None
    assert got.prompt_alt_tokens is None
    assert set(sample_results.sample_response_json(body)) == {"type", "sequences", "prompt_cache_hit_tokens"}


@pytest.mark.parametrize(
    ("scored", "dense"),
    [(DENSE, [[-0.5, 0.0], [-1.0, -1.5]]), (SPARSE, [[-0.5, 0, 0, 0], [0, 0, 0, 0], [0, -1.0, 0, 0]])],
)
def test_target_logprobs_keep_shape_and_layout(scored: TargetLogprobs, dense: list[list[float]]) -> None:
    body = sample_results.encode_sample_response(SampleOutput(PLAIN.sequences, target_prompt_logprobs=scored))
    got = deserialize_sample_response(body).target_prompt_logprobs
    assert got is not None
    assert got.dtype == "float32"
    assert torch.equal(got.to_torch(), torch.tensor(dense))
    assert got.sparse_crow_indices == (None if scored is DENSE else [0, 2, 2, 3])
    answer = sample_results.sample_response_json(body)["target_prompt_logprobs"]
    assert answer["data"] == list(scored.logprobs)
    assert answer["shape"] == list(scored.targets.shape)
    assert answer.get("sparse_col_indices") == (None if scored is DENSE else [0, 3, 1])


@pytest.mark.parametrize("rows", [0, 2])
def test_draws_are_two_tensors_of_a_row_per_position(rows: int) -> None:
    draws = AltTokens(3, ((1, 1, 70000),) * rows, ((-0.5, -0.5, -4.0),) * rows)
    body = sample_results.encode_sample_response(SampleOutput(PLAIN.sequences, prompt_alt_tokens=draws))
    got = deserialize_sample_response(body).prompt_alt_tokens
    assert got is not None
    assert got.tokens.to_numpy().tolist() == [[1, 1, 70000]] * rows
    assert got.tokens.to_numpy().shape == got.logprobs.to_numpy().shape == (rows, 3)
    assert got.tokens.dtype == "int64"
    answer = sample_results.sample_response_json(body)["prompt_alt_tokens"]
    assert answer["tokens"] == {"data": [1, 1, 70000] * rows, "dtype": "int64", "shape": [rows, 3]}


def test_sample_json_for_old_sdks() -> None:
    assert sample_results.sample_response_json(sample_results.encode_sample_response(SAMPLE)) == {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "stop",
                "tokens": [1, 70000],
                "logprobs": [-0.5, -0.25],
                "topk_logprobs": [[[7, -0.5], [0, -1.5]], [[0, -0.25], [9, -2.0]]],
                "weight_versions": [{"version": "v3", "start": 0, "end": 2}],
            },
            {"stop_reason": "length", "tokens": [3], "logprobs": [-1.0]},
        ],
        "prompt_logprobs": [None, -2.0],
        "topk_prompt_logprobs": [None, [[7, -0.5], [0, -1.5]], [[0, -0.25], [9, -2.0]]],
        "prompt_cache_hit_tokens": 16,
    }


def test_infinite_logprobs_become_the_float32_limit_in_json() -> None:
    lowest = float(np.finfo(np.float32).min)
    output = SampleOutput((SampledSequence((1,), (-np.inf,), "stop"),), prompt_logprobs=(NAN, -np.inf))
    answer = sample_results.sample_response_json(sample_results.encode_sample_response(output))
    assert answer["sequences"][0]["logprobs"] == [lowest]
    assert answer["prompt_logprobs"] == [None, lowest]
