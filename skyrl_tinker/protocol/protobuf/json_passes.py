"""forward_backward as JSON of SDKs up to 0.24, converted to the protobuf message of newer ones."""

import math
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.protobuf.tensors import Array
from skyrl_tinker.protocol.schemas.base import Items, StrictFloat, StrictMessage, parse
from skyrl_tinker.protocol.schemas.sampling import Chunk
from skyrl_tinker.protocol.schemas.training import TrainingRequest

_DTYPES: Mapping[str, tuple[pb.DType, str]] = {
    "float32": (pb.DTYPE_FLOAT32, "<f4"),
    "int64": (pb.DTYPE_INT64, "<i8"),
}
_INT32 = np.iinfo(np.int32)


def _numbers(values: Any) -> Array:
    """Return [N]. Null becomes NaN, which validation refuses with its index."""
    types = set(map(type, values)) if isinstance(values, list) else {object}
    if not types <= {int, float, NoneType}:  # NumPy would read true among numbers as 1
        raise ValueError("expected a flat list of numbers")
    if NoneType in types:
        values = [math.nan if value is None else value for value in values]
    array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        raise ValueError("expected numbers of at most 64 bits")
    return array


def _whole(array: Array) -> Array:
    if array.dtype.kind == "f" and (np.abs(array) < 2.0**53).all() and (np.floor(array) == array).all():
        return array.astype(np.int64)
    if array.dtype.kind != "i":
        raise ValueError("expected a list of int64 numbers")
    return array


def _integers(values: Any) -> Array:
    return _whole(_numbers(values))


def _tokens(values: Any) -> Array:
    tokens = _integers(values)
    beyond = tokens[(tokens < _INT32.min) | (tokens > _INT32.max)]
    if beyond.size:
        raise ValueError(f"expected int32 token ids, not {beyond[0]}")
    return tokens


_ARRAY_OF_INTEGERS = WithJsonSchema({"type": "array", "items": {"type": "integer"}})
Numbers = Annotated[
    Any, PlainValidator(_numbers), WithJsonSchema({"type": "array", "items": {"type": "number"}})
]
Integers = Annotated[Any, PlainValidator(_integers), _ARRAY_OF_INTEGERS]
Tokens = Annotated[Any, PlainValidator(_tokens), _ARRAY_OF_INTEGERS]
NumberOrText = Annotated[
    Annotated[StrictFloat, Tag("number")] | Annotated[str, Tag("text")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "number"),
]


class PassChunk(Chunk):
    tokens: Tokens | None = None


class PassText(StrictMessage):
    chunks: Items[PassChunk]


class PassTensor(StrictMessage):
    """Tensor [N] or [N, K]. With sparse indices it is CSR: `data` are the listed cells."""

    dtype: Literal["float32", "int64"]
    data: Numbers
    shape: Integers | None = None
    sparse_crow_indices: Integers | None = None
    sparse_col_indices: Integers | None = None

    @field_validator("data")
    @classmethod
    def _fit_dtype(cls, data: Array, info: ValidationInfo) -> Array:
        return _whole(data) if info.data.get("dtype") == "int64" else data


class PassDatum(StrictMessage):
    """Training example. Its spans stay unread."""

    model_input: PassText
    loss_fn_inputs: dict[str, PassTensor] = Field(fail_fast=True)
    model_input_spans: Any = None
    loss_fn_input_spans: Any = None


class PassInput(StrictMessage):
    data: Items[PassDatum]
    loss_fn: str
    loss_fn_config: dict[str, NumberOrText] | None = Field(None, fail_fast=True)


class ForwardBackwardJson(TrainingRequest):
    forward_backward_input: PassInput


class ForwardJson(TrainingRequest):
    forward_input: PassInput


def fill_from_json(message: pb.ForwardBackwardRequest, payload: Mapping[str, Any]) -> None:
    """Fill the message. Raises UserError that names the field."""
    if message.forward_only:
        sent = parse(ForwardJson, payload).forward_input
    else:
        sent = parse(ForwardBackwardJson, payload).forward_backward_input
    message.loss_fn = sent.loss_fn
    for key, value in (sent.loss_fn_config or {}).items():
        setattr(message.loss_fn_config_v2[key], "text" if isinstance(value, str) else "number", value)
    for index, datum in enumerate(sent.data):
        into = message.data.add()
        for position, chunk in enumerate(datum.model_input.chunks):
            tokens = chunk.text(f"datum {index}: model_input chunk {position}")
            into.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
        for name, tensor in datum.loss_fn_inputs.items():
            _fill_tensor(into.loss_fn_inputs[name], tensor)


def _fill_tensor(message: pb.Tensor, tensor: PassTensor) -> None:
    message.dtype, dtype = _DTYPES[tensor.dtype]
    if tensor.shape is not None:
        message.shape.extend(tensor.shape.tolist())
    with np.errstate(over="ignore"):  # beyond float32 becomes infinite, which validation refuses
        values = tensor.data.astype(dtype).tobytes()
    crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
    if crow is None and col is None:
        message.dense = values
        return
    message.sparse_csr.values = values  # without one of the indices validation refuses it
    message.sparse_csr.crow_indices = b"" if crow is None else crow.astype("<i8").tobytes()
    message.sparse_csr.col_indices = b"" if col is None else col.astype("<i8").tobytes()
