"""Protobuf tensors as numpy arrays. Bytes on the wire are little-endian, contiguous, C order."""

from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.wire.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.wire.values import Datum, Float32, Int32, Int64

_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}


def read_datum(datum: pb.Datum, inputs: tuple[str, ...], where: str) -> Datum:
    """Read tokens, target_tokens and the named float inputs, cast by name; other inputs stay unread.

    Lengths and ranges are not compared here. Raises UserError, its message beginning with `where`.
    """
    fields = datum.loss_fn_inputs
    missing = [name for name in ("target_tokens", *inputs) if name not in fields]
    if missing:
        raise UserError(f"{where}: loss_fn_inputs lacks {missing[0]!r}, found {sorted(fields) or 'none'}")
    targets = vector(fields["target_tokens"], f"{where}: loss_fn_inputs['target_tokens']")
    return Datum(
        tokens=text_tokens(datum, where),
        target_tokens=_as_int64(targets, f"{where}: loss_fn_inputs['target_tokens']"),
        inputs={name: _as_float32(fields[name], f"{where}: loss_fn_inputs[{name!r}]") for name in inputs},
    )


def text_tokens(datum: pb.Datum, where: str) -> Int32:
    """All encoded_text chunks joined: [N]. Raises NotSupportedError for other chunks."""
    for position, chunk in enumerate(datum.model_input):
        if chunk.WhichOneof("chunk") != "encoded_text":
            kind = chunk.WhichOneof("chunk") or "empty"
            raise NotSupportedError(
                f"{where}: model_input chunk {position} is of kind {kind}, expected encoded_text: "
                "images and audio are not built yet"
            )
    joined = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    return _array(joined, np.dtype("<i4"), f"{where}: model_input")


def vector(tensor: pb.Tensor, field: str) -> npt.NDArray[Any]:
    """The values of a 1-D tensor in its own dtype: [N]; an empty shape counts as 1-D."""
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        raise NotSupportedError(
            f"{field} has shape {list(tensor.shape)}, expected [N]: tensors of shape [N, K] are not built yet"
        )
    if tensor.dtype not in _DTYPES:
        raise UserError(f"{field} has dtype number {tensor.dtype}, expected float32, int64 or int32")
    values = _array(tensor.dense, _DTYPES[tensor.dtype], field)
    if tensor.shape and tensor.shape[0] != len(values):
        raise UserError(f"{field} has {len(values)} values, expected {tensor.shape[0]} (its shape)")
    return values


def _array(data: bytes, dtype: np.dtype[Any], field: str) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise UserError(
            f"{field} has {len(data)} bytes, expected a multiple of {dtype.itemsize} ({dtype.name})"
        )
    return np.frombuffer(data, dtype)


def _as_float32(tensor: pb.Tensor, field: str) -> Float32:
    return vector(tensor, field).astype(np.float32, copy=False)


def _as_int64(values: npt.NDArray[Any], field: str) -> Int64:
    if values.dtype.kind == "f":
        _require_integral(values, field)
    return values.astype(np.int64, copy=False)


def _require_integral(values: npt.NDArray[Any], field: str) -> None:
    # Beyond 2**62 a float has no int64; token ids are far below.
    bad = ~(np.abs(values) < 2.0**62) | (np.floor(values) != values)
    if bad.any():
        index = int(bad.argmax())
        raise UserError(f"{field}[{index}] is {values[index]}, expected an integer")
