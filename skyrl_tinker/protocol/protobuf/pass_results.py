"""Results of passes: stored as protobuf, converted to JSON for SDKs that ask for it."""

import math
from collections.abc import Iterator
from itertools import groupby, islice, pairwise
from typing import Any

import numpy as np

from skyrl_tinker.domain.values import Float32, PassOutput
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.protobuf.tensors import finite_floats

PROTOBUF = "application/x-protobuf"

_OUTPUT_TYPE = "ArrayRecord"


def encode_forward_backward_output(output: PassOutput) -> bytes:
    """Encode the logprobs of all datums in order: one ArrayRecord per run of [N], or of [N, K] of one K.

    Raises ValueError for a metric name that would crash the client.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE)
    for name, value in output.metrics.items():
        if name.count(":") != 1:
            raise ValueError(f"metric {name!r} must be <name>:<reduction>")
        message.metrics[name] = value
    for trailing, run in groupby(output.logprobs, key=lambda array: array.shape[1:]):
        arrays = tuple(run)
        record = message.loss_fn_outputs.add(type_tag=_OUTPUT_TYPE, num_datums=len(arrays))
        record.fields["logprobs"].CopyFrom(_batched(arrays, trailing))
    return message.SerializeToString(deterministic=True)


def all_logprobs(body: bytes) -> Float32:
    """Return the logprobs of an encoded output, of all datums end to end, [cells]."""
    records = pb.ForwardBackwardOutput.FromString(body).loss_fn_outputs
    return np.frombuffer(b"".join(record.fields["logprobs"].data for record in records), "<f4")


def _batched(arrays: tuple[Float32, ...], trailing: tuple[int, ...]) -> pb.BatchedTensor:
    offsets = np.cumsum([0, *(4 * array.size for array in arrays)], dtype="<i8")
    return pb.BatchedTensor(
        data=b"".join(array.astype("<f4", copy=False).tobytes() for array in arrays),
        offsets=offsets.tobytes(),
        dtype=pb.DTYPE_FLOAT32,
        trailing_shape=trailing,
    )


def forward_backward_output_json(body: bytes) -> dict[str, Any]:
    """Convert to JSON without NaN: only finite metrics stay, infinite logprobs become the float32 limit."""
    message = pb.ForwardBackwardOutput.FromString(body)
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": [
            {"logprobs": tensor}
            for record in message.loss_fn_outputs
            for tensor in _unbatched(record.fields["logprobs"])
        ],
        "metrics": {name: value for name, value in sorted(message.metrics.items()) if np.isfinite(value)},
    }


def logprobs_at(body: bytes, index: int) -> list[float]:
    """Return the logprobs of one datum, [N, K] row-major, infinite ones as the float32 limit."""
    values: list[float] = next(islice(each_logprobs(body), index, None)).tolist()
    return values


def each_logprobs(body: bytes) -> Iterator[Float32]:
    """Yield the logprobs of each datum, likewise."""
    for record in pb.ForwardBackwardOutput.FromString(body).loss_fn_outputs:
        tensor = record.fields["logprobs"]
        data = tensor.data  # a copy each time
        for start, end in pairwise(np.frombuffer(tensor.offsets, "<i8")):
            yield finite_floats(data[start:end])


def _unbatched(tensor: pb.BatchedTensor) -> list[dict[str, Any]]:
    values = finite_floats(tensor.data).tolist()
    offsets = (np.frombuffer(tensor.offsets, "<i8") // 4).tolist()
    trailing = list(tensor.trailing_shape)
    row = math.prod(trailing)
    return [
        {"data": values[start:end], "dtype": "float32", "shape": [(end - start) // row, *trailing]}
        for start, end in pairwise(offsets)
    ]
