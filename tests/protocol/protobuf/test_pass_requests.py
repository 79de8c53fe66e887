"""forward_backward as the SDK encodes it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.provenance_spans import PromptProvenanceSpan, SampledProvenanceSpan

from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.stored_requests import body_digest

RL = {"target_tokens": [2, 3, 4], "logprobs": [-0.5, -0.25, -1.0], "advantages": [1.0, 0.0, -2.0]}


def datum(tokens: list[int], **inputs: object) -> tinker.Datum:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def sdk_bytes(data: list[tinker.Datum], loss_fn: str = "cross_entropy", **more: object) -> bytes:
    """Return the body that the SDK posts; `forward_only` is set by its resource layer."""
    given_input = tinker.types.ForwardBackwardInput(
        data=data, loss_fn=loss_fn, loss_fn_config=more.pop("config", None)
    )
    request = tinker.types.ForwardBackwardRequest(
        forward_backward_input=given_input, model_id="s:train:0", seq_id=more.pop("seq_id", 7)
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = bool(more.pop("forward_only", False))
    return message.SerializeToString()


def read(body: bytes):
    return pass_requests.from_canonical(pass_requests.canonical(pass_requests.decode_forward_backward(body)))


def test_a_request_of_the_sdk_arrives_as_it_was_built() -> None:
    body = sdk_bytes(
        [datum([1, 2, 3], **RL), datum([4], target_tokens=[5], logprobs=[0.0], advantages=[9.0])],
        "ppo",
        config={"clip_low_threshold": 0.7},
        forward_only=True,
    )
    value = read(body)
    assert (value.model_id, value.seq_id, value.loss_fn) == ("s:train:0", 7, "ppo")
    assert value.forward_only
    assert value.loss_config == {"clip_low_threshold": 0.7}
    first, second = value.data
    assert first.tokens.dtype == np.int32
    assert first.target_tokens.dtype == np.int64
    assert first.tokens.tolist() == [1, 2, 3]
    assert first.target_tokens.tolist() == [2, 3, 4]
    assert {name: array.tolist() for name, array in first.inputs.items()} == {
        "logprobs": [-0.5, -0.25, -1.0],
        "advantages": [1.0, 0.0, -2.0],
    }
    assert all(array.dtype == np.float32 for array in first.inputs.values())
    assert second.tokens.tolist() == [4]


def test_chunks_of_text_are_joined() -> None:
    prompt = tinker.ModelInput.from_ints([1, 2]).append_int(3)
    body = sdk_bytes(
        [
            tinker.Datum(
                model_input=prompt, loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
            )
        ]
    )
    assert read(body).data[0].tokens.tolist() == [1, 2, 3]


def test_arrays_are_cast_by_name_not_by_the_dtype_that_came() -> None:
    body = sdk_bytes(
        [datum([1, 2], target_tokens=np.array([3.0, 4.0], np.float32), weights=np.array([0, -2], np.int64))]
    )
    first = read(body).data[0]
    assert first.target_tokens.dtype == np.int64
    assert first.target_tokens.tolist() == [3, 4]
    assert first.inputs["weights"].dtype == np.float32
    assert first.inputs["weights"].tolist() == [0.0, -2.0]


def test_tensors_without_shape_and_int32_tensors_are_read() -> None:
    message = pb.ForwardBackwardRequest.FromString(
        sdk_bytes([datum([1, 2], target_tokens=[3, 4], weights=[1.0, 0.5])])
    )
    tensor = message.data[0].loss_fn_inputs["target_tokens"]
    tensor.dense, tensor.dtype = np.array([3, 4], np.int32).tobytes(), pb.DTYPE_INT32
    tensor.ClearField("shape")
    assert read(message.SerializeToString()).data[0].target_tokens.tolist() == [3, 4]


def test_unread_inputs_and_provenance_spans_are_accepted() -> None:
    plain = datum([1, 2], target_tokens=[2, 3], weights=[1.0, 1.0], sequence_ratio_mask=[1.0, 1.0])
    spans = [
        PromptProvenanceSpan(sequence_id="a", offset=0, length=1),
        SampledProvenanceSpan(sequence_id="a", offset=0, length=1),
    ]
    value = read(sdk_bytes([plain.with_provenance(model_input=spans, loss_fn_inputs=spans)]))
    assert set(value.data[0].inputs) == {"weights"}


def test_the_legacy_config_map_counts_only_without_the_new_one() -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    message.loss_fn_config["clip_low_threshold"] = 0.5
    old = pass_requests.decode_forward_backward(message.SerializeToString())
    assert pass_requests.raw_config(old.message) == {"clip_low_threshold": 0.5}
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.7
    message.loss_fn_config_v2["loss_id"].text = "x"
    new = pass_requests.decode_forward_backward(message.SerializeToString())
    assert pass_requests.raw_config(new.message) == {"clip_low_threshold": 0.7, "loss_id": "x"}


def test_config_sent_to_one_map_or_to_both_is_the_same_request() -> None:
    body = sdk_bytes(
        [datum([1], **{name: values[:1] for name, values in RL.items()})],
        "ppo",
        config={"clip_low_threshold": 0.5},
    )
    legacy = pb.ForwardBackwardRequest.FromString(body)
    legacy.loss_fn_config_v2.clear()
    bodies = (body, legacy.SerializeToString())
    assert (
        len(
            {
                body_digest(pass_requests.canonical(pass_requests.decode_forward_backward(one)))
                for one in bodies
            }
        )
        == 1
    )


UNKNOWN = b"\xf8\x07\x01"  # field 127, a varint


def with_unknown(pick: Callable[[pb.ForwardBackwardRequest], Any]) -> bytes:
    """Return a request with all kinds of messages in it, one of which has a field of a newer SDK."""
    spans = [SampledProvenanceSpan(sequence_id="a", offset=0, length=1)]
    plain = datum([1], **{name: values[:1] for name, values in RL.items()})
    data = [plain, plain.with_provenance(model_input=spans, loss_fn_inputs=spans)]
    message = pb.ForwardBackwardRequest.FromString(sdk_bytes(data, "ppo", config={"clip_low_threshold": 0.5}))
    pick(message).MergeFromString(UNKNOWN)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        (
            lambda request: request,
            "^body has the unknown field number 127 of ForwardBackwardRequest, expected ",
        ),
        (
            lambda request: request.data[1],
            r"^body.data\[1\] has .* 127 of Datum, expected model_input \(1\), ",
        ),
        (lambda request: request.data[1].model_input[0], r"^body.data\[1\].model_input\[0\] has .* of Chunk"),
        (
            lambda request: request.data[0].model_input[0].encoded_text,
            r"\.encoded_text has .* EncodedTextChunk",
        ),
        (
            lambda request: request.data[0].loss_fn_inputs["advantages"],
            r"^body.data\[0\].loss_fn_inputs\['advantages'\] has the unknown field number 127 of Tensor",
        ),
        (lambda request: request.data[1].loss_fn_input_spans[0].sampled_tokens, "of SampledProvenanceSpan"),
        (
            lambda request: request.loss_fn_config_v2["clip_low_threshold"],
            r"^body.loss_fn_config_v2\['clip_low_threshold'\] has .* 127 of LossConfigValue, expected number",
        ),
    ],
)
def test_an_unknown_field_is_named_with_its_message(pick: Any, message: str) -> None:
    raw = pass_requests.decode_forward_backward(with_unknown(pick))
    assert (raw.model_id, raw.seq_id) == ("s:train:0", 7)
    with pytest.raises(UserError, match=message):
        raise raw.problem


@pytest.mark.parametrize("config", [None, {"clip_low_threshold": 0.5}])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_body_of_the_sdk_is_not_searched_for_unknown_fields(
    config: dict[str, float] | None, legacy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search takes longer than all other steps of decoding."""
    message = pb.ForwardBackwardRequest.FromString(sdk_bytes([datum([1], **RL)], "ppo", config=config))
    if legacy:
        message.loss_fn_config_v2.clear()
    monkeypatch.delattr(pass_requests, "find_unknown_field")
    assert pass_requests.decode_forward_backward(message.SerializeToString()).problem is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff\xff\xff", "the body is not a ForwardBackwardRequest protobuf"),
        (b"{}", "the body is not a ForwardBackwardRequest protobuf"),
        (b"", "model_id: .*found ''; seq_id: .*found 0"),
        (pb.ForwardBackwardRequest(model_id="m").SerializeToString(), "seq_id: .*found 0"),
        (pb.ForwardBackwardRequest(seq_id=1).SerializeToString(), "model_id: .*found ''"),
    ],
)
def test_what_cannot_get_a_future_is_refused_at_once(body: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pass_requests.decode_forward_backward(body)


tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)
floats = st.floats(width=32, allow_nan=False)


@st.composite
def datums(draw: st.DrawFn) -> tinker.Datum:
    ids = draw(tokens)
    weights = draw(st.lists(floats, min_size=len(ids), max_size=len(ids)))
    return datum(ids, target_tokens=ids[::-1], weights=weights)


@given(st.lists(datums(), min_size=1, max_size=5), st.integers(1, 2**31 - 1))
def test_canonical_bytes_read_back_to_the_arrays_that_were_sent(
    data: list[tinker.Datum], seq_id: int
) -> None:
    value = read(sdk_bytes(data, seq_id=seq_id))
    assert value.seq_id == seq_id
    for sent, got in zip(data, value.data, strict=True):
        assert got.tokens.tolist() == sent.model_input.to_ints()
        assert got.target_tokens.tolist() == sent.loss_fn_inputs["target_tokens"].data
        assert got.inputs["weights"].tobytes() == sent.loss_fn_inputs["weights"].to_numpy().tobytes()


@given(st.lists(datums(), min_size=1, max_size=3), st.randoms())
def test_the_digest_does_not_hang_on_the_order_of_map_entries(data: list[tinker.Datum], random) -> None:
    body = sdk_bytes(data)
    shuffled = pb.ForwardBackwardRequest.FromString(body)
    for one in shuffled.data:
        entries = [
            (name, pb.Tensor.FromString(tensor.SerializeToString()))
            for name, tensor in one.loss_fn_inputs.items()
        ]
        random.shuffle(entries)
        one.ClearField("loss_fn_inputs")
        for name, tensor in entries:
            one.loss_fn_inputs[name].CopyFrom(tensor)
    first, second = (
        pass_requests.canonical(pass_requests.decode_forward_backward(b))
        for b in (body, shuffled.SerializeToString())
    )
    assert body_digest(first) == body_digest(second)


@given(st.lists(datums(), min_size=1, max_size=2), st.lists(datums(), min_size=1, max_size=2))
def test_digests_are_equal_only_for_equal_requests(one: list[tinker.Datum], two: list[tinker.Datum]) -> None:
    first, second = (
        pass_requests.canonical(pass_requests.decode_forward_backward(sdk_bytes(data))) for data in (one, two)
    )
    assert (body_digest(first) == body_digest(second)) == (first == second)
    again = pass_requests.canonical(pass_requests.decode_forward_backward(first))
    assert again == first


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_user_error(body: bytes) -> None:
    try:
        raw = pass_requests.decode_forward_backward(body)
    except UserError:
        return
    assert len(body_digest(pass_requests.canonical(raw))) == 32
