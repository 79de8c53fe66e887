"""Stored bodies, and the digests that distinguish a retry from a misuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.values import AdamParams, DimuonParams
from skyrl_tinker.protocol.stored_requests import (
    CreateModelBody,
    CreateViaLoadBody,
    LoadWeightsBody,
    OptimStepBody,
    SaveExternalBody,
    SaveSamplerBody,
    SaveWeightsBody,
    payload_digest,
)

KIND = RequestKind.SAVE_WEIGHTS_FOR_SAMPLER


@pytest.mark.parametrize(
    "body",
    [
        OptimStepBody(AdamParams(learning_rate=0.1, grad_clip_norm=1.0)),
        OptimStepBody(DimuonParams(learning_rate=0.1, beta1=0.8)),
        SaveWeightsBody("a", 3600, True, {"k": "v"}),
        SaveExternalBody("a"),
        SaveExternalBody("a", 3600, ["age1x"]),
        SaveSamplerBody(name="a"),
        SaveSamplerBody(sampling_session_seq_id=3, user_metadata={"k": "v"}),
        LoadWeightsBody("tinker://m/weights/a", True),
        CreateModelBody(),
        CreateViaLoadBody("tinker://m/weights/a", False, "m", {"type": "dimuon", "version": 1}),
    ],
)
def test_a_body_reads_back_to_an_equal_value(body) -> None:
    assert type(body).from_bytes(body.to_bytes()) == body


def test_a_retried_ephemeral_save_is_the_same_request() -> None:
    """The SDK retries an ephemeral save with the next sampling_session_seq_id."""
    first = {"model_id": "m", "seq_id": 3, "sampling_session_seq_id": 0, "kind": "snapshot", "type": KIND}
    assert payload_digest(KIND, first) == payload_digest(KIND, {**first, "sampling_session_seq_id": 1})


def test_type_nulls_and_key_order_do_not_count() -> None:
    first = {"model_id": "m", "seq_id": 3, "path": "a", "ttl_seconds": None, "type": "save_weights"}
    second = {"path": "a", "seq_id": 3, "model_id": "m"}
    assert payload_digest(KIND, first) == payload_digest(KIND, second)


def test_kind_and_every_other_field_count() -> None:
    first = {"model_id": "m", "seq_id": 3, "path": "a", "user_metadata": {"type": "x"}}
    others = [
        {**first, "path": "b"},
        {**first, "seq_id": 4},
        {**first, "user_metadata": {}},
        {**first, "more": 1},
    ]
    digests = {payload_digest(KIND, payload) for payload in (first, *others)}
    digests.add(payload_digest(RequestKind.SAVE_WEIGHTS, first))
    assert len(digests) == 6


def test_integers_of_more_than_64_bits_count_too() -> None:
    digests = {payload_digest(KIND, {"seed": seed, "b": 1}) for seed in (2**70, 2**70 + 1, float(2**70))}
    assert len(digests) == 3
    assert payload_digest(KIND, {"b": 1, "seed": 2**70}) in digests


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), json_values, max_size=6), st.randoms())
def test_digests_are_stable_for_any_payload(payload, random) -> None:
    items = list(payload.items())
    random.shuffle(items)
    assert payload_digest(KIND, dict(items)) == payload_digest(KIND, payload)
