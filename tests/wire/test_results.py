"""Results of passes, decoded with the SDK's own code."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto.response_conv import deserialize_forward_backward_output

from skyrl_tinker.wire import codec
from skyrl_tinker.wire.ids import RequestId
from skyrl_tinker.wire.values import PassOutput

NAN = float("nan")


def output(*logprobs: list[float], **metrics: float) -> PassOutput:
    arrays = tuple(np.array(row, np.float32) for row in logprobs)
    return PassOutput(
        RequestId("r"), arrays, {"loss:sum": 1.5, **{f"{k}:sum": v for k, v in metrics.items()}}
    )


def test_the_sdk_reads_logprobs_per_datum_in_order() -> None:
    got = deserialize_forward_backward_output(
        codec.encode_forward_backward_output(output([-1.0, -2.0], [-0.5], x=NAN))
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
    body = codec.encode_forward_backward_output(output(*rows))
    got = deserialize_forward_backward_output(body).loss_fn_outputs
    assert [datum["logprobs"].to_numpy().tobytes() for datum in got] == [
        np.array(r, "<f4").tobytes() for r in rows
    ]


@pytest.mark.parametrize("name", ["loss", "loss:sum:x", ""])
def test_metric_names_that_crash_the_sdk_never_leave(name: str) -> None:
    with pytest.raises(ValueError, match="must be <name>:<reduction>"):
        codec.encode_forward_backward_output(PassOutput(RequestId("r"), (), {name: 1.0}))


def test_pass_output_json_for_old_sdks() -> None:
    body = codec.encode_forward_backward_output(output([-1.0, -2.0], [-math.inf], x=NAN, y=math.inf))
    assert codec.forward_backward_output_json(body) == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2]}},
            {"logprobs": {"data": [float(np.finfo(np.float32).min)], "dtype": "float32", "shape": [1]}},
        ],
        "metrics": {"loss:sum": 1.5},
    }
