"""forward_backward and forward as SDKs up to 0.24 send them: JSON, up to 0.16 without types and defaults."""

import gc
import json
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker import Datum, ModelInput, TensorData
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest

from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.protocol.protobuf.pass_requests import RawForwardBackward
from skyrl_tinker.protocol.stored_requests import body_digest
from skyrl_tinker.protocol.validation.limits import Limits
from skyrl_tinker.protocol.validation.training import validate_forward_backward

FLAT = r"(item 0 is .*, )?expected a flat list of numbers"
LIMITS = Limits("tiny", vocab_size=100, context_length=8, max_datums=4, max_lora_rank=8)

# Byte for byte what SDK 0.16 dumps.
OLD = """{"forward_backward_input": {"data": [{"loss_fn_inputs": {
    "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
    "weights": {"data": [0.0, 1.0, 1.0], "dtype": "float32", "shape": [3]}},
    "model_input": {"chunks": [{"tokens": [1, 2, 3]}]}}], "loss_fn": "cross_entropy"},
    "model_id": "s:train:0", "seq_id": 1}"""


def payload(**changes):
    """Return OLD with fields of its one datum, its input or its envelope replaced."""
    value = json.loads(OLD)
    inner = value["forward_backward_input"]
    datum = inner["data"][0]
    for key, change in changes.items():
        owner = next((part for part in (datum, inner, value) if key in part), inner)
        owner[key] = change
    return value


def from_sdk(sent: Datum) -> RawForwardBackward:
    request = ForwardBackwardRequest(
        forward_backward_input=ForwardBackwardInput(data=[sent], loss_fn="cross_entropy"),
        model_id="s:train:0",
        seq_id=1,
    )
    return pass_requests.decode_forward_backward(
        forward_backward_request_to_proto(request).SerializeToString()
    )


def test_old_json_and_new_protobuf_of_one_request_are_the_same_request() -> None:
    sent = Datum(
        model_input=ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
    )
    new = from_sdk(sent)
    assert pass_requests.canonical(
        pass_requests.decode_forward_backward_json(json.loads(OLD))
    ) == pass_requests.canonical(new)


def test_forward_input_means_forward_only() -> None:
    value = json.loads(OLD)
    value["forward_input"] = value.pop("forward_backward_input")
    raw = pass_requests.decode_forward_backward_json(value)
    assert raw.forward_only
    assert validate_forward_backward(raw, LIMITS).forward_only
    assert not pass_requests.decode_forward_backward_json(json.loads(OLD)).forward_only


def test_types_nulls_missing_shapes_and_configs_are_tolerated() -> None:
    value = payload(
        model_input={"chunks": [{"type": "encoded_text", "tokens": [1]}, {"type": None, "tokens": [2]}]},
        loss_fn_inputs={
            "target_tokens": {"data": [2.0, 3], "dtype": "int64", "shape": None},
            "logprobs": {"data": [-1, -0.5], "dtype": "float32"},
            "advantages": {"data": [1, 1], "dtype": "float32"},
        },
        loss_fn="ppo",
        loss_fn_config={"clip_low_threshold": 1},
    )
    value |= {"type": "forward_backward", "an_option_of_a_newer_sdk": None}
    got = validate_forward_backward(pass_requests.decode_forward_backward_json(value), LIMITS)
    assert got.loss_config == {"clip_low_threshold": 1.0}
    assert got.data[0].tokens.tolist() == [1, 2]
    assert got.data[0].target_tokens.tolist() == [2, 3]
    assert got.data[0].inputs["logprobs"].tolist() == [-1.0, -0.5]
    no_config = payload(loss_fn_config=None)
    assert (
        validate_forward_backward(pass_requests.decode_forward_backward_json(no_config), LIMITS).loss_config
        == {}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_only": True}, "input has the unknown key 'forward_only', expected data, loss_fn, loss_fn"),
        ({"model_input": {"chunks": [], "text": ""}}, "data.0.model_input has the unknown key 'text'"),
        (
            {"model_input": {"chunks": [{"tokens": [1], "text": ""}]}},
            "data.0.model_input.chunks.0 has the unknown key 'text', expected type, tokens",
        ),
        (
            {"loss_fn_inputs": {"weights": {"data": [1], "dtype": "float32", "pad": 0}}},
            "data.0.loss_fn_inputs.weights has the unknown key 'pad', expected dtype, data, shape, ",
        ),
        ({"forward_backward_input": None}, "forward_backward_input: expected an object, found None"),
        ({"data": None}, "forward_backward_input.data: .* a valid list, found None"),
        ({"data": {"a": 1}}, "forward_backward_input.data: .* a valid list, found {'a': 1}"),
        ({"data": []}, "data is empty, expected at least one datum"),
        ({"loss_fn": None}, "forward_backward_input.loss_fn: .* a valid string, found None"),
        ({"loss_fn_config": {"a": [1]}}, r"loss_fn_config.a: expected a number or a text, found \[1\]"),
        ({"loss_fn_config": {"a": True}}, "loss_fn_config.a: expected a number or a text, found True"),
        ({"model_input": None}, "data.0.model_input: expected an object, found None"),
        ({"model_input": {"chunks": [{}]}}, "datum 0: model_input chunk 0 has no tokens"),
        ({"model_input": {"chunks": [{"tokens": "abc"}]}}, f"chunks.0.tokens: {FLAT}, found 'abc'"),
        (
            {"model_input": {"chunks": [{"tokens": [1, "a"]}]}},
            "tokens: item 1 is .a., expected a flat list",
        ),
        (
            {"model_input": {"chunks": [{"tokens": [1.5]}]}},
            "tokens: item 0 is 1.5, expected a list of int64",
        ),
        ({"model_input": {"chunks": [{"tokens": [True]}]}}, f"chunks.0.tokens: {FLAT}"),
        ({"model_input": {"chunks": [{"tokens": [True, 1, 2]}]}}, f"chunks.0.tokens: {FLAT}"),
        ({"loss_fn_inputs": {"weights": {"data": [True, 0.5], "dtype": "float32"}}}, f"weights.data: {FLAT}"),
        ({"model_input": {"chunks": [{"tokens": [[1], [2, 3]]}]}}, f"chunks.0.tokens: {FLAT}"),
        (
            {"model_input": {"chunks": [{"tokens": [1, 2**40]}]}},
            rf"datum 0: model_input chunk 0.tokens\[1\] is {2**40}, expected an int32 token id",
        ),
        ({"model_input": {"chunks": [{"tokens": [2**70]}]}}, "tokens: expected numbers of at most 64 bits"),
        ({"model_input": {"chunks": [{"tokens": [2**63]}]}}, "tokens: expected a list of int64 numbers"),
        (
            {"loss_fn_inputs": {"weights": [1.0]}},
            r"loss_fn_inputs.weights: expected an object, found \[1.0\]",
        ),
        (
            {"loss_fn_inputs": {"weights": {"data": [1], "dtype": "int8"}}},
            "loss_fn_inputs.weights.dtype: .* 'float32' or 'int64', found 'int8'",
        ),
        ({"loss_fn_inputs": {"weights": {"data": ["1"], "dtype": "float32"}}}, f"weights.data: {FLAT}"),
        ({"loss_fn_inputs": {"weights": {"data": [[1.0]], "dtype": "float32"}}}, f"weights.data: {FLAT}"),
        (
            {"loss_fn_inputs": {"weights": {"data": [1.5], "dtype": "int64"}}},
            "weights.data: item 0 is 1.5, expected a list of int64 numbers",
        ),
    ],
)
def test_json_without_protobuf_form_keeps_its_seq_id_and_fails_in_validation(change, message: str) -> None:
    raw = pass_requests.decode_forward_backward_json(payload(**change))
    assert (raw.model_id, raw.seq_id) == ("s:train:0", 1)
    with pytest.raises(UserError, match=message):
        validate_forward_backward(raw, LIMITS)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([0.0, None, 1.0], r"datum 0: loss_fn_inputs\['weights'\].*nan"),
        ([0.0, 1e300, 1.0], r"datum 0: loss_fn_inputs\['weights'\].*inf"),
        ([0.0, 10**400, 1.0], "loss_fn_inputs.weights.data: expected numbers of at most 64 bits"),
    ],
)
def test_numbers_that_float32_cannot_hold_are_named(value: list[float], found: str) -> None:
    inputs = json.loads(OLD)["forward_backward_input"]["data"][0]["loss_fn_inputs"]
    inputs["weights"]["data"] = value
    with pytest.raises(UserError, match=found):
        validate_forward_backward(
            pass_requests.decode_forward_backward_json(payload(loss_fn_inputs=inputs)), LIMITS
        )


@pytest.mark.parametrize(
    ("chunk", "kind"),
    [
        ({"data": "aGk=", "format": "png"}, "image"),
        ({"type": "image", "data": "aGk=", "format": "png"}, "image"),
        ({"location": "x", "format": "png"}, "image_asset_pointer"),
        ({"dmel": "aGk="}, "dmel"),
    ],
)
def test_other_chunks_are_refused_by_name(chunk: dict[str, str], kind: str) -> None:
    raw = pass_requests.decode_forward_backward_json(
        payload(model_input={"chunks": [{"tokens": [1]}, chunk]})
    )
    with pytest.raises(
        NotSupportedError, match=f"datum 0: model_input chunk 1 is of kind {kind}, expected encoded_text"
    ):
        validate_forward_backward(raw, LIMITS)


DENSE = {"data": [5, 0, 0, 7, 0, 9], "dtype": "int64", "shape": [3, 2]}
SPARSE = {
    "data": [5, 7, 9],
    "dtype": "int64",
    "shape": [3, 2],
    "sparse_crow_indices": [0, 1, 2, 3],
    "sparse_col_indices": [0, 1, 1],
}
WEIGHTS = {"data": [1.0, 0, 0, 0.5, 0, -1.0], "dtype": "float32", "shape": [3, 2]}
TARGETS = r"datum 0: loss_fn_inputs\['target_tokens'\]"


@pytest.mark.parametrize("targets", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_candidates_come_dense_or_sparse(targets) -> None:
    value = payload(loss_fn_inputs={"target_tokens": targets, "weights": WEIGHTS})
    first = validate_forward_backward(pass_requests.decode_forward_backward_json(value), LIMITS).data[0]
    assert first.target_tokens.tolist() == [[5, 0], [0, 7], [0, 9]]
    assert first.inputs["weights"].tolist() == [[1.0, 0.0], [0.0, 0.5], [0.0, -1.0]]


@pytest.mark.parametrize("name", ["target_tokens", "weights"])
def test_sparse_json_and_protobuf_of_one_request_are_the_same_request(name: str) -> None:
    values = torch.zeros(3, 9, dtype=torch.int64 if name == "target_tokens" else torch.float32)
    values[1, 4] = 2
    tensors = {"target_tokens": TensorData.from_numpy(np.ones((3, 9), np.int64))}
    tensors["weights"] = TensorData.from_numpy(np.ones((3, 9), np.float32))
    tensors[name] = TensorData.from_torch_sparse(values)
    sent = Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=tensors)
    new = from_sdk(sent)
    old = payload(loss_fn_inputs={key: as_json(tensor) for key, tensor in tensors.items()})
    assert "sparse_csr" in str(new.message)
    assert pass_requests.canonical(
        pass_requests.decode_forward_backward_json(old)
    ) == pass_requests.canonical(new)


def as_json(tensor: TensorData) -> dict[str, object]:
    fields = {"data": tensor.data, "dtype": tensor.dtype, "shape": tensor.shape}
    sparse = {
        "sparse_crow_indices": tensor.sparse_crow_indices,
        "sparse_col_indices": tensor.sparse_col_indices,
    }
    return fields | {key: value for key, value in sparse.items() if value is not None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparse_crow_indices": None}, rf"{TARGETS} crow_indices: found 0 numbers, expected 4 that rise"),
        ({"sparse_col_indices": None}, rf"{TARGETS} col_indices has 0 numbers, expected 3 \(one per value\)"),
        (
            {"sparse_col_indices": [0, 1, 0.5]},
            "data.0.loss_fn_inputs.target_tokens.sparse_col_indices: item 2 is 0.5, expected a list",
        ),
        ({"shape": None}, rf"{TARGETS} is sparse with shape \[\], expected \[N, K\]"),
        ({"shape": [3, 10**12]}, f"{TARGETS} has {3 * 10**12} values, expected at most {LIMITS.max_targets}"),
        ({"sparse_crow_indices": [0, 2, 1, 3]}, f"{TARGETS} crow_indices: found 4 numbers, expected 4 that"),
    ],
)
def test_malformed_sparse_json_is_named(change, message: str) -> None:
    inputs = {"target_tokens": SPARSE | change, "weights": WEIGHTS}
    raw = pass_requests.decode_forward_backward_json(payload(loss_fn_inputs=inputs))
    with pytest.raises(UserError, match=message):
        validate_forward_backward(raw, LIMITS)


@pytest.mark.parametrize(
    "change", [{"model_id": None}, {"seq_id": None}, {"seq_id": 0}, {"seq_id": 2**31}, {"seq_id": "1"}]
)
def test_json_that_cannot_get_a_future_is_refused_at_once(change) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        pass_requests.decode_forward_backward_json(payload(**change))


def test_a_bad_request_and_its_good_neighbour_have_different_digests() -> None:
    good = json.loads(OLD)
    bad = json.loads(OLD)
    bad["forward_backward_input"]["data"].append(None)
    digests = {
        body_digest(pass_requests.canonical(pass_requests.decode_forward_backward_json(one)))
        for one in (good, bad)
    }
    assert len(digests) == 2


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3)
    ),
    max_leaves=6,
)
tensors = st.fixed_dictionaries(
    {"data": anything, "dtype": st.sampled_from(["float32", "int64"])},
    optional={"shape": anything, "sparse_crow_indices": anything, "sparse_col_indices": anything},
)
datums = st.fixed_dictionaries(
    {
        "model_input": st.fixed_dictionaries(
            {"chunks": st.lists(st.fixed_dictionaries({"tokens": anything}) | anything)}
        ),
        "loss_fn_inputs": st.dictionaries(st.sampled_from(["target_tokens", "weights"]), tensors | anything),
    }
)


@given(data=st.lists(datums | anything, max_size=3) | anything, config=anything)
def test_any_json_is_a_value_or_a_user_error(data, config) -> None:
    raw = pass_requests.decode_forward_backward_json(payload(data=data, loss_fn_config=config))
    assert len(body_digest(pass_requests.canonical(raw))) == 32
    try:
        validate_forward_backward(raw, LIMITS)
    except UserError:
        return


def test_of_a_wrong_pass_nothing_is_kept_until_the_next_collection() -> None:
    """Bodies are large, and a collection may be far off: `freeze_gc`."""
    gc.collect()
    gc.disable()
    try:
        value = payload(model_input={"chunks": [Chunk(tokens=[0.5])]})
        gone = weakref.ref(value["forward_backward_input"]["data"][0]["model_input"]["chunks"][0])
        raw = pass_requests.decode_forward_backward_json(value)
        with pytest.raises(UserError, match=r"item 0 is 0\.5"):
            validate_forward_backward(raw, LIMITS)
        del value, raw
        assert gone() is None
    finally:
        gc.enable()


class Chunk(dict[str, Any]):
    """To which there may be weak references."""
