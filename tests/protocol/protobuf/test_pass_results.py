"""Results of passes, decoded with the SDK's own code."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto.response_conv import deserialize_forward_backward_output

from skyrl_tinker.domain.ids import RequestId
from skyrl_tinker.domain.values import PassOutput
from skyrl_tinker.protocol.protobuf import pass_results
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb

NAN = float("nan")


def output(*logprobs: list[float], **metrics: float) -> PassOutput:
    arrays = tuple(np.array(row, np.float32) for row in logprobs)
    return PassOutput(
        RequestId("r"), arrays, {"loss:sum": 1.5, **{f"{k}:sum": v for k, v in metrics.items()}}
    )


def test_the_sdk_reads_logprobs_per_datum_in_order() -> None:
    got = deserialize_forward_backward_output(
        pass_results.encode_forward_backward_output(output([-1.0, -2.0], [-0.5], x=NAN))
    )
    assert [datum["logprobs"].tolist() for datum in got.loss_fn_outputs] == [[-1.0, -2.0], [-0.5]]
    assert [datum["logprobs"].shape for datum in got.loss_fn_outputs] == [[2], [1]]
    assert got.loss_fn_outputs[0]["logprobs"].dtype == "float32"
    assert got.loss_fn_output_type == "ArrayRecord"
    assert got.metrics["loss:sum"] == 1.5
    assert math.isnan(got.metrics["x:sum"])


@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9), min_size=1, max_size=9)
)
def test_logprobs_survive_to_the_bit(rows: list[list[float]]) -> None:
    body = pass_results.encode_forward_backward_output(output(*rows))
    got = deserialize_forward_backward_output(body).loss_fn_outputs
    assert [datum["logprobs"].to_numpy().tobytes() for datum in got] == [
        np.array(r, "<f4").tobytes() for r in rows
    ]


shapes = st.lists(
    st.tuples(st.integers(1, 5)) | st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=8
)


@given(shapes, st.integers(0, 2**32 - 1))
def test_logprobs_of_any_mix_of_shapes_keep_shape_and_order(shapes: list[tuple[int, ...]], seed: int) -> None:
    generator = np.random.default_rng(seed)
    sent = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]
    body = pass_results.encode_forward_backward_output(
        PassOutput(RequestId("r"), tuple(sent), {"loss:sum": 0.0})
    )
    got = deserialize_forward_backward_output(body).loss_fn_outputs
    assert [tuple(datum["logprobs"].shape) for datum in got] == shapes
    assert [datum["logprobs"].to_numpy().tobytes() for datum in got] == [array.tobytes() for array in sent]
    old = pass_results.forward_backward_output_json(body)["loss_fn_outputs"]
    for datum, array in zip(old, sent, strict=True):
        assert datum["logprobs"]["shape"] == list(array.shape)
        assert datum["logprobs"]["data"] == array.ravel().tolist()


def test_datums_of_one_shape_share_a_record() -> None:
    arrays = [np.zeros(shape, np.float32) for shape in ((2,), (3,), (2, 4), (5, 4), (1, 1), (2,))]
    body = pass_results.encode_forward_backward_output(PassOutput(RequestId("r"), tuple(arrays), {}))
    records = pb.ForwardBackwardOutput.FromString(body).loss_fn_outputs
    assert [(record.num_datums, list(record.fields["logprobs"].trailing_shape)) for record in records] == [
        (2, []),
        (2, [4]),
        (1, [1]),
        (1, []),
    ]


@pytest.mark.parametrize("name", ["loss", "loss:sum:x", ""])
def test_metric_names_that_crash_the_sdk_never_leave(name: str) -> None:
    with pytest.raises(ValueError, match="must be <name>:<reduction>"):
        pass_results.encode_forward_backward_output(PassOutput(RequestId("r"), (), {name: 1.0}))


def test_pass_output_json_for_old_sdks() -> None:
    body = pass_results.encode_forward_backward_output(output([-1.0, -2.0], [-math.inf], x=NAN, y=math.inf))
    assert pass_results.forward_backward_output_json(body) == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2]}},
            {"logprobs": {"data": [float(np.finfo(np.float32).min)], "dtype": "float32", "shape": [1]}},
        ],
        "metrics": {"loss:sum": 1.5},
    }
