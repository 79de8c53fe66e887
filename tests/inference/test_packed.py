"""The packed form of a sampler's answers."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tinker.inference.packed import PROTOCOL, ask, pack, tell, together, unpack

TYPES = st.sampled_from(["<i4", "<f4", "<i2", "|u1", ">i4"])
SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3)


@given(st.lists(st.tuples(TYPES, SHAPES, st.integers(0, 99)), max_size=5))
def test_an_answer_is_what_was_packed(given: list[tuple[str, list[int], int]]) -> None:
    arrays = [np.random.default_rng(seed).integers(0, 99, shape).astype(kind) for kind, shape, seed in given]
    choices: list[dict[str, Any]] = [{"index": at, "in": {"it": each}} for at, each in enumerate(arrays)]
    found = unpack(pack({"model": "base", "choices": choices, "none": None}))
    assert (found["model"], found["none"]) == ("base", None)
    assert [choice["index"] for choice in found["choices"]] == [*range(len(arrays))]
    for choice, expected in zip(found["choices"], arrays, strict=True):
        assert choice["in"]["it"].dtype == expected.dtype.newbyteorder("<")
        np.testing.assert_array_equal(choice["in"]["it"], expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_arrays_are_packed_row_by_row(transposed: bool) -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    array = array.T if transposed else array[:, 1:]
    np.testing.assert_array_equal(unpack(pack({"array of": array}))["array of"], array)


def test_messages_of_this_number_have_this_form() -> None:
    """Servers by URL may be of another commit: whoever changes the bytes counts PROTOCOL up."""
    answer = tell("a", 200, pack({"x": np.array([258], np.int32)}))
    assert [PROTOCOL, together([ask("a", "key", b"{}"), b"b"]), together([answer])] == [
        "skyrl-tinker.samples.1",
        b"\x08" + bytes(7) + b"a\nkey\n{}" + b"\x01" + bytes(7) + b"b",
        b"\x33" + bytes(7) + b'a\n200\n%\0\0\0{"x": {"array": "<i4", "shape": [1]}}\x02\x01\0\0',
    ]


def test_a_logprob_that_is_no_number_stays_none() -> None:
    found = unpack(pack({"logprobs": np.array([np.nan, -np.inf, -0.1], np.float32)}))["logprobs"]
    assert str(found.tolist()) == f"[nan, -inf, {float(np.float32(-0.1))}]"
