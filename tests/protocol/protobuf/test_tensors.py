"""Dense and sparse tensors of the wire, compared with torch and with the SDK's own conversion."""

import re
import warnings

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tinker.proto.request_conv import _tensor_data_to_proto

from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.protobuf.tensors import count_values, read_tensor
from tests.protocol.support.messages import csr, tensor

shapes = st.tuples(st.integers(1, 12), st.integers(1, 12))
mostly_zero = st.one_of(st.just(0), st.just(0), st.integers(-(2**62), 2**62))
matrices = shapes.flatmap(lambda shape: arrays.arrays(np.int64, shape, elements=mostly_zero))


def torch_csr(matrix: np.ndarray, dtype: type) -> pb.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        sparse = torch.from_numpy(matrix.astype(dtype)).to_sparse_csr()
    return csr(sparse.values(), sparse.crow_indices(), sparse.col_indices(), matrix.shape, dtype)


def sdk(data: tinker.TensorData) -> pb.Tensor:
    return pb.Tensor.FromString(_tensor_data_to_proto(data).SerializeToString())


@given(matrices, st.sampled_from([np.float32, np.int64]))
def test_what_torch_made_sparse_becomes_what_it_was(matrix: np.ndarray, dtype: type) -> None:
    sparse = torch_csr(matrix, dtype)
    dense = tensor(matrix, dtype, matrix.shape)
    assert count_values(sparse, "x") == count_values(dense, "x") == matrix.size
    got = read_tensor(sparse, "x")
    assert got.dtype == dtype
    assert got.shape == matrix.shape
    assert got.tobytes() == read_tensor(dense, "x").tobytes() == matrix.astype(dtype).tobytes()


@given(matrices, st.booleans())
def test_the_sdk_may_choose_either_form(matrix: np.ndarray, whole: bool) -> None:
    given_tensor = torch.from_numpy(matrix if whole else matrix.astype(np.float32))
    dense, either = (
        tinker.TensorData.from_torch(given_tensor),
        tinker.TensorData.from_torch_sparse(given_tensor),
    )
    got = [read_tensor(sdk(data), "x") for data in (dense, either)]
    assert got[0].tobytes() == got[1].tobytes() == given_tensor.numpy().tobytes()
    assert got[0].shape == got[1].shape == matrix.shape


def test_rows_without_values_and_a_tensor_without_any_are_zero() -> None:
    assert read_tensor(csr([], [0, 0, 0], [], (2, 3)), "x").tolist() == [[0.0] * 3] * 2
    assert read_tensor(csr([7], [0, 0, 1, 1], [2], (3, 3)), "x").tolist() == [[0] * 3, [0, 0, 7], [0] * 3]


SHAPE = r"x is sparse with shape {}, expected [N, K], both of at least 1"
CROW = "x crow_indices: found {} numbers, expected 3 that rise from 0 to 2 (the number of values)"
LAST = 2**63 - 1

WRONG = {
    "no shape": (csr([1], [0, 1], [0], ()), SHAPE.format([])),
    "one dimension": (csr([1], [0, 1], [0], (1,)), SHAPE.format([1])),
    "three dimensions": (csr([1], [0, 1], [0], (1, 1, 1)), SHAPE.format([1, 1, 1])),
    "no rows": (csr([], [0], [], (0, 2)), SHAPE.format([0, 2])),
    "negative": (csr([], [0], [], (-1, -2)), SHAPE.format([-1, -2])),
    "short crow": (csr([1, 2], [0, 2], [0, 1], (2, 2)), CROW.format(2)),
    "long crow": (csr([1, 2], [0, 1, 2, 2], [0, 1], (2, 2)), CROW.format(4)),
    "no crow": (csr([1, 2], [], [0, 1], (2, 2)), CROW.format(0)),
    "crow not from 0": (csr([1, 2], [1, 1, 2], [0, 1], (2, 2)), CROW.format(3)),
    "crow not to the end": (csr([1, 2], [0, 1, 1], [0, 1], (2, 2)), CROW.format(3)),
    "crow falls": (csr([1, 2], [0, 3, 2], [0, 1], (2, 2)), CROW.format(3)),
    "crow wraps around": (
        csr([1, 2], [0, LAST, -LAST - 1, 2], [0, 1], (3, 2)),
        "x crow_indices: found 4 numbers, expected 4 that rise from 0 to 2",
    ),
    "short col": (
        csr([1, 2], [0, 1, 2], [0], (2, 2)),
        "x col_indices has 1 numbers, expected 2 (one per value)",
    ),
    "column too high": (
        csr([1, 2], [0, 1, 2], [0, 2], (2, 2)),
        "x col_indices[1] is 2, expected a column in [0, 2)",
    ),
    "column below 0": (
        csr([1, 2], [0, 1, 2], [-1, 0], (2, 2)),
        "x col_indices[0] is -1, expected a column in [0, 2)",
    ),
    "a column twice": (
        csr([1, 2], [0, 0, 2], [1, 1], (2, 2)),
        "x col_indices[1] is 1, expected more than the column before it in its row",
    ),
    "columns fall": (
        csr([1, 2], [0, 0, 2], [1, 0], (2, 2)),
        "x col_indices[1] is 0, expected more than the column before it in its row",
    ),
    "no dtype": (
        pb.Tensor(sparse_csr=pb.SparseCsr(), shape=(1, 1)),
        "x has dtype number 0, expected float32, int64 or int32",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_a_malformed_sparse_tensor_is_named(wrong: pb.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        read_tensor(wrong, "x")


@pytest.mark.parametrize("part", ["values", "crow_indices", "col_indices"])
def test_a_part_of_a_number_at_the_end_is_named(part: str) -> None:
    wrong = csr([1], [0, 1], [0], (1, 1))
    setattr(wrong.sparse_csr, part, getattr(wrong.sparse_csr, part) + b"\0")
    with pytest.raises(UserError, match=f"^x {part} has .* bytes, expected a multiple of"):
        read_tensor(wrong, "x")


numbers = st.lists(st.integers(-3, 5) | st.sampled_from([LAST, -LAST - 1]), max_size=5)


@given(st.lists(st.floats(width=32), max_size=4), numbers, numbers, st.lists(st.integers(-1, 4), max_size=3))
def test_any_sparse_tensor_is_an_array_of_its_shape_or_a_user_error(values, crow, col, shape) -> None:
    hostile = csr(values, crow, col, tuple(shape))
    try:
        got = read_tensor(hostile, "x")
    except UserError:
        return
    assert list(got.shape) == shape
    assert np.count_nonzero(got) == np.count_nonzero(values)
    assert count_values(hostile, "x") == got.size
