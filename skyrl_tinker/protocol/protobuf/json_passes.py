"""forward_backward as JSON of SDKs up to 0.24, converted to the protobuf message of newer ones."""

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PlainValidator, WithJsonSchema

from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.protobuf.tensors import refuse_where
from skyrl_tinker.protocol.schemas.base import Integers, Items, StrictMessage, parse
from skyrl_tinker.protocol.schemas.sampling import Chunk, TensorJson
from skyrl_tinker.protocol.schemas.training import TrainingRequest

_DTYPES: Mapping[str, tuple[pb.DType, str]] = {
    "float32": (pb.DTYPE_FLOAT32, "<f4"),
    "int64": (pb.DTYPE_INT64, "<i8"),
}


def _number_or_text(value: Any) -> float | str:
    if isinstance(value, str):
        return value
    if type(value) not in (int, float):
        raise ValueError("expected a number or a text")
    return float(value)


NumberOrText = Annotated[
    Any, PlainValidator(_number_or_text), WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]})
]


class PassChunk(Chunk):
    tokens: Integers | None = None


class PassText(StrictMessage):
    chunks: Items[PassChunk]


class PassDatum(StrictMessage):
    """Training example. Its spans stay unread."""

    model_input: PassText
    loss_fn_inputs: dict[str, TensorJson] = Field(fail_fast=True)
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
            where = f"datum {index}: model_input chunk {position}"
            tokens = np.asarray(chunk.text(where))
            ids = tokens.astype("<i4")
            refuse_where(ids != tokens, tokens, f"{where}.tokens", "an int32 token id")
            into.model_input.add().encoded_text.tokens = ids.tobytes()
        for name, tensor in datum.loss_fn_inputs.items():
            _fill_tensor(into.loss_fn_inputs[name], tensor)


def _fill_tensor(message: pb.Tensor, tensor: TensorJson) -> None:
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
