"""forward_backward as JSON of SDKs up to 0.24, converted to the protobuf message of newer ones.

An unknown key is refused by name; one that is null counts as absent.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.schemas.base import shorten
from skyrl_tinker.protocol.schemas.sampling import TEXT, chunk_type

_DTYPES: Mapping[str, tuple[pb.DType, np.dtype[Any]]] = {
    "float32": (pb.DTYPE_FLOAT32, np.dtype("<f4")),
    "int64": (pb.DTYPE_INT64, np.dtype("<i8")),
}
_SPARSE = {"crow_indices": "sparse_crow_indices", "col_indices": "sparse_col_indices"}
_ENVELOPE = ("model_id", "seq_id", "type")
_DATUM = ("model_input", "loss_fn_inputs", "model_input_spans", "loss_fn_input_spans")  # spans stay unread
_TENSOR = ("data", "dtype", "shape", *_SPARSE.values())
_INT32 = np.iinfo(np.int32)


def fill_from_json(message: pb.ForwardBackwardRequest, payload: Mapping[str, Any]) -> None:
    """Fill the message; on UserError, which names the field, it is filled up to there."""
    key = "forward_input" if message.forward_only else "forward_backward_input"
    _refuse_unknown_keys(payload, "body", (*_ENVELOPE, key))
    body = _known_object(payload.get(key), key, ("data", "loss_fn", "loss_fn_config"))
    message.loss_fn = _text(body.get("loss_fn"), f"{key}.loss_fn")
    _fill_config(message, body.get("loss_fn_config"))
    for index, datum in enumerate(_list(body.get("data"), f"{key}.data")):
        _fill_datum(message.data.add(), datum, f"datum {index}")


def _fill_config(message: pb.ForwardBackwardRequest, config: Any) -> None:
    for key, value in _object(config or {}, "loss_fn_config").items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            message.loss_fn_config_v2[key].number = _float(value)
        else:
            raise UserError(f"loss_fn_config[{shorten(key)}] is {shorten(value)}, expected a number")


def _fill_datum(message: pb.Datum, datum: Any, where: str) -> None:
    fields = _known_object(datum, where, _DATUM)
    model_input = _known_object(fields.get("model_input"), f"{where}: model_input", ("chunks",))
    for index, chunk in enumerate(_list(model_input.get("chunks"), f"{where}: model_input.chunks")):
        _fill_chunk(message.model_input.add(), chunk, f"{where}: model_input chunk {index}")
    inputs = _object(fields.get("loss_fn_inputs"), f"{where}: loss_fn_inputs")
    for name, tensor in inputs.items():
        _fill_tensor(message.loss_fn_inputs[name], tensor, f"{where}: loss_fn_inputs[{name!r}]")


def _fill_chunk(message: pb.Chunk, chunk: Any, where: str) -> None:
    kind = chunk_type(_object(chunk, where))
    if kind != TEXT:
        raise NotSupportedError(
            f"{where} is of kind {kind}, expected {TEXT}: images and audio are not supported yet"
        )
    _refuse_unknown_keys(chunk, where, ("type", "tokens"))
    tokens = _integers(_list(chunk.get("tokens"), f"{where}.tokens"), f"{where}.tokens")
    beyond = tokens[(tokens < _INT32.min) | (tokens > _INT32.max)]
    if beyond.size:
        raise UserError(f"{where}.tokens holds {beyond[0]}, expected int32 token ids")
    message.encoded_text.tokens = tokens.astype("<i4").tobytes()


def _fill_tensor(message: pb.Tensor, tensor: Any, where: str) -> None:
    fields = _known_object(tensor, where, _TENSOR)
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise UserError(f"{where}.dtype is {shorten(dtype)}, expected 'float32' or 'int64'")
    message.dtype, numpy_dtype = _DTYPES[dtype]
    message.shape.extend(
        _integers(_list(fields.get("shape") or [], f"{where}.shape"), f"{where}.shape").tolist()
    )
    data = _list(fields.get("data"), f"{where}.data")
    values = _integers(data, where) if dtype == "int64" else _numbers(data, where)
    with np.errstate(
        over="ignore"
    ):  # beyond float32 becomes infinite, which validation refuses with its index
        encoded = values.astype(numpy_dtype).tobytes()
    if any(fields.get(name) is not None for name in _SPARSE.values()):
        _fill_sparse(message.sparse_csr, fields, encoded, where)
    else:
        message.dense = encoded


def _fill_sparse(message: pb.SparseCsr, fields: Mapping[str, Any], values: bytes, where: str) -> None:
    message.values = values
    for key, name in _SPARSE.items():
        indices = _integers(_list(fields.get(name), f"{where}.{name}"), f"{where}.{name}")
        setattr(message, key, indices.astype("<i8").tobytes())


def _numbers(values: list[Any], where: str) -> npt.NDArray[Any]:
    """Return an array of numbers. Null becomes NaN, which validation refuses with its index."""
    array = _one_dimensional(values, where)
    if array.dtype.kind == "O":
        array = _one_dimensional([np.nan if value is None else value for value in values], where)
    if array.dtype.kind not in "iuf":
        raise UserError(f"{where} holds something that is not a number")
    return array


def _integers(values: list[Any], where: str) -> npt.NDArray[Any]:
    array = _one_dimensional(values, where) if values else np.empty(0, np.int64)
    if array.dtype.kind == "f" and (np.abs(array) < 2.0**53).all() and (np.floor(array) == array).all():
        array = array.astype(np.int64)
    if array.dtype.kind != "i":
        raise UserError(f"{where} holds something that is not an int64 number")
    return array


def _one_dimensional(values: list[Any], where: str) -> npt.NDArray[Any]:
    booleans = bool in set(map(type, values))  # NumPy would read them as 0 and 1 among numbers
    try:
        array = np.asarray(values, object if booleans else None)
    except ValueError as error:  # a list of lists of different lengths
        raise UserError(f"{where} is nested, expected a flat list of numbers") from error
    if array.ndim != 1:
        raise UserError(f"{where} is nested, expected a flat list of numbers")
    return array


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an int of hundreds of digits; validation refuses infinity with the key's range
        return math.inf


def _known_object(value: Any, where: str, known: Collection[str]) -> Mapping[str, Any]:
    fields = _object(value, where)
    _refuse_unknown_keys(fields, where, known)
    return fields


def _refuse_unknown_keys(fields: Mapping[str, Any], where: str, known: Collection[str]) -> None:
    for key in fields.keys() - set(known):
        if fields[key] is not None:
            raise UserError(f"{where} has the unknown key {shorten(key)}, expected {', '.join(known)}")


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where} is {_kind(value)}, expected an object")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{where} is {_kind(value)}, expected a list")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where} is {_kind(value)}, expected a string")
    return value


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
