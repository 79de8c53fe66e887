"""Costs of a sample by its request."""

from typing import Any

import pytest

from skyrl_tinker.domain.samples import LISTED_PER_PLACE, SampleRequest, SamplingParams, TargetTokens

PROMPT = tuple(range(1, 1 + LISTED_PER_PLACE))


@pytest.mark.parametrize(
    ("samples", "scores", "places"),
    [
        (3, {}, 3),
        (3, {"prompt_logprobs": True}, 3),
        (1, {"topk_prompt_logprobs": 20}, 20),
        (1, {"prompt_alt_tokens_k": 7, "topk_prompt_logprobs": 3}, 10),
        (30, {"topk_prompt_logprobs": 20}, 30),
        (4, {"topk_sample_logprobs": 20}, 4),
        (4, {"topk_sample_logprobs": 200}, 4 * 4),
        (1, {"target_prompt_logprobs": TargetTokens((len(PROMPT) - 1, 5), PROMPT * 5)}, 5),
    ],
)
def test_a_sample_takes_places_by_its_sequences_or_by_the_logprobs_that_it_lists(
    samples: int, scores: dict[str, Any], places: int
) -> None:
    assert SampleRequest(PROMPT, samples, SamplingParams(), **scores).places == places
