"""Protobuf tensors as numpy arrays. Their bytes are little-endian, contiguous, C order.

Sparse tensors are CSR: row r lists the values crow[r] to crow[r + 1], at the columns in col; the rest is 0.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_tinker.domain.values import Float32, Int64
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb

Array = npt.NDArray[Any]

_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
_INT64 = np.dtype("<i8")
_FLOAT32 = np.finfo(np.float32)


def count_values(tensor: pb.Tensor, field: str) -> int:
    """Count the numbers of the dense array that `read_tensor` returns. Raises UserError."""
    if _is_sparse(tensor):
        rows, columns = _sparse_shape(tensor, field)
        return rows * columns
    return len(tensor.dense) // _dtype(tensor, field).itemsize


def read_tensor(tensor: pb.Tensor, field: str) -> Array:
    """Return [N] or [N, K] in its own dtype, dense; an empty shape counts as 1-D.

    A sparse tensor takes the memory of its shape: call `count_values` first. Raises UserError.
    """
    if _is_sparse(tensor):
        return _densified(tensor, field)
    values = as_array(tensor.dense, _dtype(tensor, field), field)
    return values.reshape(_dense_shape(tensor, len(values), field))


def as_array(data: bytes, dtype: np.dtype[Any], field: str) -> Array:
    """Return [n], read-only. Raises UserError for an incomplete number at the end."""
    if len(data) % dtype.itemsize:
        raise UserError(
            f"{field} has {len(data)} bytes, expected a multiple of {dtype.itemsize} ({dtype.name})"
        )
    return np.frombuffer(data, dtype)


def as_float32(values: Array) -> Float32:
    return values.astype(np.float32, copy=False)


def finite_floats(data: bytes) -> Float32:
    """Return [n] of float32 bytes, infinities replaced by the limits of float32; NaN stays."""
    values: Float32 = np.frombuffer(data, "<f4").clip(_FLOAT32.min, _FLOAT32.max)
    return values


def as_int64(values: Array, field: str) -> Int64:
    """Return int64. Raises UserError for a fraction."""
    if values.dtype.kind == "f":
        # Beyond 2**62 a float has no int64; token ids are far below.
        refuse_where(~(np.abs(values) < 2.0**62) | (np.floor(values) != values), values, field, "an integer")
    return values.astype(np.int64, copy=False)


def refuse_where(bad: npt.NDArray[np.bool_], values: Array, field: str, expected: str) -> None:
    """Raise UserError that names the first of `values` where `bad` is true; both have one shape."""
    if bad.any():
        index = np.unravel_index(bad.argmax(), bad.shape)
        position = ", ".join(map(str, index))
        raise UserError(f"{field}[{position}] is {values[index]}, expected {expected}")


def _is_sparse(tensor: pb.Tensor) -> bool:
    return tensor.HasField("sparse_csr")


def _dtype(tensor: pb.Tensor, field: str) -> np.dtype[Any]:
    if tensor.dtype not in _DTYPES:
        raise UserError(f"{field} has dtype number {tensor.dtype}, expected float32, int64 or int32")
    return _DTYPES[tensor.dtype]


def _dense_shape(tensor: pb.Tensor, count: int, field: str) -> tuple[int, ...]:
    shape = tuple(tensor.shape) or (count,)
    if len(shape) > 2 or (len(shape) == 2 and min(shape) < 1):
        raise UserError(f"{field} has shape {list(shape)}, expected [N], or [N, K] with both of at least 1")
    if math.prod(shape) != count:
        raise UserError(f"{field} has {count} values, expected {math.prod(shape)} (its shape {list(shape)})")
    return shape


def _sparse_shape(tensor: pb.Tensor, field: str) -> tuple[int, int]:
    shape = list(tensor.shape)
    if len(shape) != 2 or min(shape) < 1:
        raise UserError(f"{field} is sparse with shape {shape}, expected [N, K], both of at least 1")
    return shape[0], shape[1]


def _densified(tensor: pb.Tensor, field: str) -> Array:
    """Return a sparse tensor as a dense [N, K]."""
    rows, columns = _sparse_shape(tensor, field)
    values = as_array(tensor.sparse_csr.values, _dtype(tensor, field), f"{field} values")
    crow = as_array(tensor.sparse_csr.crow_indices, _INT64, f"{field} crow_indices")
    col = as_array(tensor.sparse_csr.col_indices, _INT64, f"{field} col_indices")
    dense = np.zeros((rows, columns), values.dtype)
    dense[rows_of(crow, col, (rows, columns), len(values), f"{field} "), col] = values
    return dense


def rows_of(crow: Int64, col: Int64, shape: tuple[int, int], count: int, field: str) -> Int64:
    """Return the row of each of the `count` values of a CSR matrix. Raises UserError for wrong indices.

    `field`: beginning of their names.
    """
    _check_crow(crow, shape[0], count, field)
    row = np.repeat(np.arange(shape[0]), np.diff(crow))
    _check_col(col, row, shape[1], field)
    return row


def _check_crow(crow: Int64, rows: int, count: int, field: str) -> None:
    # Compared, not subtracted: differences of hostile int64 numbers wrap around.
    if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != count or (crow[1:] < crow[:-1]).any():
        raise UserError(
            f"{field}crow_indices: found {len(crow)} numbers, "
            f"expected {rows + 1} that rise from 0 to {count} (the number of values)"
        )


def _check_col(col: Int64, row: Int64, columns: int, field: str) -> None:
    """Raise UserError for a wrong column. `row`: [values], the row of each value."""
    if len(col) != len(row):
        raise UserError(f"{field}col_indices has {len(col)} numbers, expected {len(row)} (one per value)")
    outside = (col < 0) | (col >= columns)
    refuse_where(outside, col, f"{field}col_indices", f"a column in [0, {columns})")
    falls = np.zeros(len(col), np.bool_)
    falls[1:] = (row[1:] == row[:-1]) & (col[1:] <= col[:-1])
    refuse_where(falls, col, f"{field}col_indices", "more than the column before it in its row")
