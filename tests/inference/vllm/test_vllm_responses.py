"""Logprobs listed in packed answers: the same, down to ties, as from the JSON of vLLM's own route."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tinker.errors import UserError
from skyrl_tinker.inference.packed import pack, unpack
from skyrl_tinker.inference.vllm.vllm_responses import parse
from tests.inference.support.samplers import ask

VOCABULARY = 6
LEAST = -9999.0
VALUES = st.sampled_from([-0.0, 0.0, -0.25, -0.5, -1.5, -20000.0, -np.inf])  # few: with ties
ROWS = st.lists(st.lists(VALUES, min_size=VOCABULARY, max_size=VOCABULARY), min_size=1, max_size=4)


def likeliest(row: list[float], k: int, random: Any) -> list[tuple[int, float]]:
    """The k most likely of a row, ties in any order."""
    cells = list(enumerate(row))
    random.shuffle(cells)
    return sorted(cells, key=lambda cell: -cell[1])[:k]


def arrays(rows: list[list[float]], own: list[int], tops: list[list[tuple[int, float]]]) -> dict[str, Any]:
    values = [
        [row[token], *(value for _, value in top)] for row, token, top in zip(rows, own, tops, strict=True)
    ]
    tokens = [[token for token, _ in top] for top in tops]
    return {"likeliest": np.array(tokens, np.int32), "logprobs": np.array(values, np.float32)}


def answer(choice: dict[str, Any], **scores: Any) -> dict[str, Any]:
    return {
        "model": "base",
        "usage": {},
        "choices": [{"index": 0, "finish_reason": "length"} | choice],
    } | scores


@given(ROWS, st.integers(1, VOCABULARY - 1), st.data(), st.randoms())
def test_listed_logprobs_of_samples_are_those_of_json(
    rows: list[list[float]], k: int, data: st.DataObject, random: Any
) -> None:
    rows = [[max(row[0], -0.5), *row[1:]] for row in rows]  # one token at least is possible
    possible = [[token for token, value in enumerate(row) if value > LEAST] for row in rows]
    own = [data.draw(st.sampled_from(each)) for each in possible]
    tops = [likeliest(row, k + 1, random) for row in rows]
    content = []
    for row, token, top in zip(rows, own, tops, strict=True):
        listed = list(({token: row[token]} | dict(top)).items())[: k + 1]
        entries = [{"token_id": each, "logprob": max(value, LEAST)} for each, value in listed]
        content.append({"logprob": row[token], "top_logprobs": entries})
    request = ask((1, 2), topk_sample_logprobs=k)
    plain = parse(answer({"token_ids": own, "logprobs": {"content": content}}), request)
    packed = answer({"token_ids": np.array(own, np.int32), "logprobs": arrays(rows, own, tops)})
    assert parse(unpack(pack(packed)), request) == plain


@given(ROWS, st.integers(0, VOCABULARY - 1), st.data(), st.randoms())
def test_listed_logprobs_of_prompts_are_those_of_json(
    rows: list[list[float]], k: int, data: st.DataObject, random: Any
) -> None:
    own = [data.draw(st.integers(0, VOCABULARY - 1)) for _ in rows]
    last_n = data.draw(st.sampled_from([None, *range(1, len(rows) + 1)]))
    tops = [likeliest(row, k, random) for row in rows]
    listed: list[Any] = [None]
    for row, token, top in zip(rows, own, tops, strict=True):
        cells = {token: row[token]} | dict(top)
        clamped = {each: LEAST if value == -np.inf else value for each, value in cells.items()}
        listed.append({str(each): {"logprob": value} for each, value in clamped.items()})
    scores = {"prompt_logprobs": True, "topk_prompt_logprobs": k, "prompt_logprobs_last_n": last_n}
    request = ask((0, *own), **scores)
    plain = parse(answer({"token_ids": [], "logprobs": None}, prompt_logprobs=listed), request)
    none = np.empty((0, 1), np.float32)
    sampled = {"token_ids": np.empty(0, np.int32), "logprobs": {"likeliest": none[:, 1:], "logprobs": none}}
    packed = parse(unpack(pack(answer(sampled, prompt_logprobs=arrays(rows, own, tops)))), request)
    assert repr(packed) == repr(plain)  # NaN is not equal to itself


def test_a_prompt_scored_by_no_number_shows_divergence() -> None:
    listed = arrays([[np.nan, 0.0]], [0], [[(1, 0.0)]])
    with pytest.raises(UserError, match="diverged"):
        parse(
            answer({"token_ids": [], "logprobs": None}, prompt_logprobs=listed),
            ask((1, 0), prompt_logprobs=True),
        )
