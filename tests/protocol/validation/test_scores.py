"""asample: scores of the prompt and likeliest tokens, accepted or refused with a message."""

from typing import Any

import pytest
import tinker
import torch

from skyrl_tinker.domain.samples import SampleRequest, TargetTokens
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.sampling import AsampleRequest
from skyrl_tinker.protocol.validation.limits import Limits
from skyrl_tinker.protocol.validation.sampling import validate_sample

LIMITS = Limits("tiny", vocab_size=10, context_length=4000, max_datums=3, max_lora_rank=8)
TARGETS = "target_prompt_logprobs"


def validate(prompt: int = 4, max_tokens: int = 1, samples: int = 1, **fields: Any) -> SampleRequest:
    body = {
        "sampling_session_id": "s",
        "seq_id": 0,
        "num_samples": samples,
        "prompt": {"chunks": [{"tokens": [1] * prompt}]},
        "sampling_params": {"max_tokens": max_tokens},
    }
    return validate_sample(parse(AsampleRequest, {**body, **fields}), LIMITS)


def tensor(data: list[Any], shape: list[int], **fields: Any) -> dict[str, Any]:
    return {"data": data, "dtype": "int64", "shape": shape, **fields}


def sparse(data: list[int], crow: list[int], col: list[int], shape: list[int]) -> dict[str, Any]:
    return tensor(data, shape, sparse_crow_indices=crow, sparse_col_indices=col)


def test_all_scores_of_the_sdk_arrive_as_they_were_built() -> None:
    ids = torch.full((3, 8), -1)
    ids[1, 6] = 9
    target = tinker.TensorData.from_torch_sparse(ids, pad_value=-1)
    sent = tinker.types.SampleRequest(
        prompt=tinker.ModelInput.from_ints([1, 2, 3, 4]),
        sampling_params=tinker.SamplingParams(max_tokens=1),
        sampling_session_id="s",
        seq_id=0,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs={
            "data": target.data,
            "dtype": target.dtype,
            "shape": target.shape,
            "sparse_crow_indices": target.sparse_crow_indices,
            "sparse_col_indices": target.sparse_col_indices,
        },
        prompt_alt_tokens_k=4,
        prompt_logprobs_last_n=3,
    )
    request = parse(AsampleRequest, sent.model_dump(exclude_none=True, mode="json"))
    got = validate_sample(request, LIMITS)
    assert (got.prompt_logprobs, got.topk_prompt_logprobs, got.topk_sample_logprobs) == (True, 2, 3)
    assert got.target_prompt_logprobs == TargetTokens((3, 8), (9,), (0, 0, 1, 1), (6,))
    assert (got.prompt_alt_tokens_k, got.prompt_logprobs_last_n) == (4, 3)


def test_a_dense_tensor_may_hold_minus_one_and_the_same_token_twice() -> None:
    got = validate(target_prompt_logprobs=tensor([5, 5, -1, -1, 0, 9], [3, 2])).target_prompt_logprobs
    assert got == TargetTokens((3, 2), (5, 5, -1, -1, 0, 9))


def test_any_score_lets_a_full_context_be_asked_for() -> None:
    targets = tensor([-1] * 3998 + [1], [3999, 1])
    for scores in (
        {"topk_prompt_logprobs": 1},
        {"prompt_alt_tokens_k": 1},
        {"target_prompt_logprobs": targets},
    ):
        assert len(validate(4000, **scores).prompt) == 4000
    with pytest.raises(UserError, match="4000 prompt tokens"):
        validate(4000, topk_sample_logprobs=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs is -1, expected 0 to 9"),
        ({"topk_sample_logprobs": 10}, "topk_sample_logprobs is 10, expected 0 to 9"),
        ({"prompt_alt_tokens_k": 1025}, "prompt_alt_tokens_k is 1025, expected 0 to 1024"),
        ({"topk_prompt_logprobs": 1.5}, "topk_prompt_logprobs: .*found 1.5"),
        (
            {"prompt": 2000, "prompt_alt_tokens_k": 1000},
            "prompt_alt_tokens_k: 2000 prompt tokens x 1000 = 2000000, expected at most 1048576",
        ),
        (
            {"samples": 4000, "max_tokens": 100, "topk_sample_logprobs": 9},
            "topk_sample_logprobs: 4000 samples x 100 tokens x 9 = 3600000, expected at most 1048576",
        ),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n is 2 without prompt_logprobs, expected both"),
        (
            {"prompt_logprobs_last_n": 4, "prompt_logprobs": True},
            "prompt_logprobs_last_n is 4, expected 1 to 3",
        ),
        ({"prompt_logprobs_last_n": 0, "prompt_logprobs": True}, "prompt_logprobs_last_n is 0"),
    ],
)
def test_widths_out_of_bounds_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(**fields)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"data": []}, "target_prompt_logprobs.dtype is missing"),
        (
            tensor([0.5] * 3, [3, 1]),
            r"target_prompt_logprobs.data: item 0 is 0.5, .*int64 .*, found \[0.5, 0.5",
        ),
        ({**tensor([1.0] * 3, [3, 1]), "dtype": "float32"}, "dtype is 'float32', expected 'int64'"),
        ({**tensor([1] * 3, [3, 1]), "dtype": "float32"}, "dtype is 'float32', expected 'int64'"),
        ({"data": [1] * 3, "dtype": "int64"}, r"shape is None, expected \[3, K\]"),
        (tensor([1] * 3, [3]), r"shape is \[3\], expected \[3, K\]"),
        (tensor([1] * 4, [4, 1]), r"shape is \[4, 1\], expected \[3, K\]"),
        (tensor([], [3, 0]), r"shape is \[3, 0\], expected \[3, K\]"),
        (tensor([1] * 5, [3, 2]), r"has 5 values, expected 6 \(its shape \[3, 2\]\)"),
        (tensor([1, 2, 10], [3, 1]), r"target_prompt_logprobs.data\[2\] is 10, expected .*\[-1, 10\)"),
        (tensor([1, -2, 1], [3, 1]), r"target_prompt_logprobs.data\[1\] is -2"),
        (tensor([-1] * 3, [3, 1]), "names no token: found only -1, expected at least one"),
        (sparse([1], [0, 1], [0], [3, 1]), f"{TARGETS}.sparse_crow_indices: found 2 numbers, expected 4"),
        (sparse([1], [0, 2, 1, 1], [0], [3, 1]), f"{TARGETS}.sparse_crow_indices: .*rise from 0 to 1"),
        (sparse([1], [0, 1, 1, 1], [], [3, 1]), f"{TARGETS}.sparse_col_indices has 0 numbers, expected 1"),
        (
            sparse([1, 2], [0, 2, 2, 2], [1, 0], [3, 2]),
            r"col_indices\[1\] is 0, expected more than the column before it in its row",
        ),
        (sparse([1], [0, 0, 0, 1], [2], [3, 2]), r"col_indices\[0\] is 2, expected a column in \[0, 2\)"),
        (
            sparse([1], [0, 0, 0, 1], [2**63], [3, 2**63 + 1]),
            "shape: item 1 is 9.2.*, expected .*int64",
        ),
        (tensor([1], [3, 1], sparse_col_indices=[0]), "crow_indices: found 0 numbers"),
        (tensor([1] * 6000, [3, 2000]), "has 2000 tokens in a row, expected at most 1024"),
    ],
)
def test_wrong_targets_are_named(targets: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(target_prompt_logprobs=targets)


def test_a_long_list_of_wrong_items_is_named_by_its_first() -> None:
    with pytest.raises(UserError) as refusal:
        validate(target_prompt_logprobs=tensor([0.5] * 10000, [3, 1]))
    assert len(str(refusal.value)) < 300
