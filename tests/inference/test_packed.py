"""The packed form of a sampler's answers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tinker.inference.packed import pack, unpack

SEQUENCES = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e4, 0, width=32)), max_size=5), max_size=4
)


@given(SEQUENCES)
def test_an_answer_is_what_was_packed(sequences: list[list[tuple[int, float]]]) -> None:
    tokens = [[token for token, _ in each] for each in sequences]
    logprobs = [[logprob for _, logprob in each] for each in sequences]
    payload = {"model": "base", "choices": [{"index": index} for index in range(len(sequences))]}
    found = unpack(pack(payload, tokens, [np.asarray(each, np.float32) for each in logprobs]))
    assert found["model"] == "base"
    assert [(choice["index"], choice["token_ids"], choice["logprobs"]) for choice in found["choices"]] == [
        *zip(range(len(sequences)), tokens, logprobs, strict=True)
    ]


def test_a_logprob_that_is_no_number_stays_none() -> None:
    (choice,) = unpack(pack({"choices": [{}]}, [[1, 2]], [np.array([np.nan, -np.inf])]))["choices"]
    assert str(choice["logprobs"]) == "[nan, -inf]"
