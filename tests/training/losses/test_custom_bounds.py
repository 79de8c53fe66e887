"""Hostile losses: refused by name, before they take memory, time, or the process with them."""

import math
import resource
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from skyrl_tinker.domain.custom_loss_ops import FUNCTIONS, METHODS
from skyrl_tinker.domain.values import CustomLoss
from skyrl_tinker.errors import UserError
from skyrl_tinker.training.losses.custom import custom
from skyrl_tinker.training.losses.custom_bounds import (
    ROW_SECONDS,
    SECONDS,
    Budget,
    largest_size,
    seconds_left,
    tensors_in,
)
from skyrl_tinker.training.losses.custom_graph import read
from skyrl_tinker.training.losses.custom_ops import CALL_FUNCTION, CALL_METHOD
from skyrl_tinker.training.trainer_spec import TrainerSpec
from tests.training.losses.support.uploads import by_hand, compute, context, draw, node, ref

L = ref("logprobs")


def run(loss: CustomLoss, length: int = 8) -> torch.Tensor:
    return compute(loss, [(draw(length), {})])[0].values


def method(name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return node(name, target, *args, op="call_method", **kwargs)


TOTAL = method("total", "sum", ref("x"))


def of(*calls: dict[str, Any]) -> CustomLoss:
    """The sum of `x`."""
    return by_hand(*calls, TOTAL)


def doubling(times: int, target: str = "torch.cat") -> list[dict[str, Any]]:
    """Each call joins the one before with itself."""
    names = ["logprobs", *(f"x{i}" for i in range(times - 1)), "x"]
    return [node(name, target, [ref(before), ref(before)]) for before, name in pairwise(names)]


def outer(times: int) -> list[dict[str, Any]]:
    """Each call multiplies its predecessor with all of itself."""
    calls = []
    for i in range(times):
        before = ref(f"x{i - 1}" if i else "logprobs")
        calls += [
            method(f"flat{i}", "reshape", before, -1),
            method(f"column{i}", "unsqueeze", ref(f"flat{i}"), 1),
            node(f"x{i}", "operator.mul", ref(f"flat{i}"), ref(f"column{i}")),
        ]
    return [*calls, method("x", "clone", ref(f"x{times - 1}"))]


def squaring(times: int) -> list[dict[str, Any]]:
    names = ["n", *(f"n{i}" for i in range(times))]
    return [
        method("n", "numel", L),
        *(node(name, "operator.mul", ref(before), ref(before)) for before, name in pairwise(names)),
        node("x", "operator.mul", L, ref(names[-1])),
    ]


BOMBS: dict[str, tuple[CustomLoss, str]] = {
    "zeros": (of(node("x", "torch.zeros", 10**12)), r"node 'x' \(torch.zeros\): .*1000000000000 elements"),
    "zeros of many sizes": (of(node("x", "torch.zeros", *[10**6] * 4)), "elements"),
    "zeros by keyword": (of(node("x", "torch.zeros", size={"tuple": [10**6, 10**6]})), "elements"),
    "full": (of(node("x", "torch.full", {"tuple": [2**40]}, 1.0)), "elements"),
    "new_full": (of(method("x", "new_full", L, {"tuple": [2**40]}, 1.0)), "elements"),
    "new_zeros": (of(method("x", "new_zeros", L, 2**40)), "elements"),
    "arange": (of(node("x", "torch.arange", 0, 10**12, 3)), "elements"),
    "arange of floats": (of(node("x", "torch.arange", 0, 1.0, 1e-12)), "integers"),
    "arange by keyword": (of(node("x", "torch.arange", end=10**12)), "by position"),
    "repeat": (of(method("x", "repeat", L, 10**10)), "elements"),
    "repeat in a tuple": (of(method("x", "repeat", L, {"tuple": [10**5, 10**5]})), "elements"),
    "a tensor for a size": (
        of(node("n", "torch.full", {"tuple": []}, 10**8), method("i", "long", ref("n")),
           method("x", "repeat", L, ref("i"))),
        "a tensor for a size",
    ),
    "a tensor among sizes": (
        of(node("n", "torch.full", {"tuple": []}, 10**9), method("i", "long", ref("n")),
           node("x", "torch.ones", {"tuple": [ref("i")]})),
        "a tensor for a size",
    ),
    "new ones": (of(method("x", "new_ones", L, {"tuple": [10**5, 10**5]})), "elements"),
    "new, full of": (of(method("x", "new_full", L, {"tuple": [10**5, 10**5]}, 1.0)), "elements"),
    "expand": (of(method("x", "expand", L, 10**12, -1)), "elements"),
    "broadcast_to": (of(node("x", "torch.broadcast_to", L, {"tuple": [10**12, 8]})), "elements"),
    "doubling": (of(*doubling(60)), "elements"),
    "stacking": (of(*doubling(60, "torch.stack")), "dimensions"),
    "outer products": (of(*outer(6)), "elements"),
    "a reduction that broadcasts inside": (
        by_hand(
            method("row", "repeat", L, 10**4),
            method("column", "unsqueeze", ref("row"), 1),
            node("total", "torch.nn.functional.mse_loss", ref("row"), ref("column")),
        ),
        "elements",
    ),
    "indices that repeat": (
        by_hand(
            method("wide", "repeat", L, 1000, 1),
            node("zeros", "torch.zeros", 100_000, dtype={"dtype": "int64"}),
            node("x", "operator.getitem", ref("wide"), {"tuple": [{"slice": [None] * 3}, ref("zeros")]}),
            TOTAL,
        ),
        "elements",
    ),
    "much of what is allowed": (
        of(method("big", "repeat", L, 100_000), *(method(f"x{i}", "exp", ref("big")) for i in range(500)),
           method("x", "exp", ref("big"))),
        "touches more than",
    ),
    "dimensions": (of(node("x", "operator.getitem", L, {"tuple": [None] * 60})), "dimensions"),
    "Python's integers": (of(*squaring(200)), "more than 64 bits"),
    "Python's powers": (
        of(method("n", "numel", L), node("p", "operator.pow", ref("n"), 10**9),
           node("x", "operator.mul", L, ref("p"))),
        "exponent",
    ),
    "tuples": (
        of(node("s", "getattr", L, "shape"), node("p", "operator.mul", ref("s"), 10**12),
           node("x", "operator.mul", L, 1)),
        "expected a tensor or number",
    ),
    "complex numbers": (
        of(node("c", "operator.pow", -1, 0.5), node("x", "operator.mul", L, ref("c"))), "made complex"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BOMBS)
def test_bombs_are_refused_by_name_without_taking_memory_or_time(case: str) -> None:
    loss, message = BOMBS[case]
    run(of(method("x", "exp", L)))  # whatever torch needs once
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    with pytest.raises(UserError, match=message) as failure:
        run(loss)
    assert "custom loss 'by_hand'" in str(failure.value)
    assert len(str(failure.value)) < 500
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss < 1 << 20  # KiB


TRAPS: dict[str, tuple[CustomLoss, str]] = {
    "integer division": (
        of(
            node("least", "torch.full", {"tuple": [8]}, -(2**63) + 1, dtype={"dtype": "int64"}),
            node("less", "operator.sub", ref("least"), 1),
            node("x", "torch.div", ref("less"), -1, rounding_mode="trunc"),
        ),
        "division of integers",
    ),
    "floor division": (
        of(method("whole", "long", L), node("x", "operator.floordiv", ref("whole"), ref("whole"))),
        "division of integers",
    ),
    "remainder": (
        of(method("whole", "long", L), method("x", "remainder", ref("whole"), other=-1)),
        "division of integers",
    ),
    "bytes of another type": (
        of(node("d", "getattr", L, "dtype"), method("i", "long", L), method("x", "view", ref("i"), ref("d"))),
        "dtype",
    ),
    "an index beyond the end": (
        of(node("far", "torch.full", {"tuple": [2]}, 10**9), method("i", "long", ref("far")),
           node("x", "operator.getitem", L, ref("i"))),
        "out of bounds",
    ),
    "gather beyond the end": (
        of(node("far", "torch.full", {"tuple": [2]}, -5000), method("i", "long", ref("far")),
           method("x", "gather", L, 0, ref("i"))),
        "out of bounds",
    ),
    "division by zero": (
        of(node("z", "operator.truediv", 1, 0), node("x", "operator.mul", L, ref("z"))), "division by zero"
    ),
    "a number too large": (
        of(node("z", "math.exp", 10**6), node("x", "operator.mul", L, ref("z"))), "math range error"
    ),
    "a tensor for math": (
        of(method("s", "sum", L), node("z", "math.exp", ref("s")), node("x", "operator.mul", L, ref("z"))),
        "expected a number",
    ),
    "an attribute that is a method": (
        of(node("v", "getattr", L, "values"), node("x", "operator.mul", L, 1)), "no attribute 'values'"
    ),
    "a list as an index": (of(node("x", "operator.getitem", L, [0, 1])), "list in an index"),
    "True as an index": (of(node("x", "operator.getitem", L, True)), "bool in an index"),
}  # fmt: skip


@pytest.mark.parametrize("case", TRAPS)
def test_what_could_end_the_process_ends_only_the_request(case: str) -> None:
    loss, message = TRAPS[case]
    with pytest.raises(UserError, match=message):
        run(loss)


WRONG_RESULTS = {
    "not a scalar": (by_hand(method("total", "exp", L)), r"shape \(8,\)"),
    "a number": (by_hand(method("total", "numel", L)), "type int"),
    "an integer tensor": (by_hand(method("total", "count_nonzero", L)), "torch.int64"),
}


@pytest.mark.parametrize("case", WRONG_RESULTS)
def test_a_loss_must_be_a_scalar_of_floats(case: str) -> None:
    loss, message = WRONG_RESULTS[case]
    with pytest.raises(UserError, match=f"the loss is .*{message}"):
        run(loss)


def test_time_is_limited() -> None:
    late = Budget(8, deadline=time.monotonic() - 1)
    with pytest.raises(UserError, match=r"node 'x' \(exp\): .* takes more than .* s for one request"):
        read(of(method("x", "exp", L))).evaluate([draw(8)], late)


def test_a_pass_cannot_be_held_up_by_many_rows_nor_a_row_by_many_requests() -> None:
    assert seconds_left(0.0, 0.0) == SECONDS
    assert seconds_left(SECONDS, 0.0) == 0.0
    spent = 0.0
    for _ in range(30):
        assert seconds_left(0.0, spent) > 0.0, "others have taken all"
        spent += seconds_left(0.0, spent)
    assert spent <= ROW_SECONDS < TrainerSpec("", 2, "cpu", "float32", 1, 64).timeout_s


def test_a_request_without_time_left_fails_as_late() -> None:
    late = replace(context(of(method("x", "exp", L)), [(draw(8), {})]), seconds=0.0)
    with pytest.raises(UserError, match="takes more than 20 s for one request"):
        custom(draw(8), late)


def test_what_every_loss_needs_fits_the_budget() -> None:
    """Largest upload on the longest data: 4096 positions with 20 candidates."""
    budget = Budget(4096 * 20, math.inf)
    operation, args = CALL_FUNCTION["operator.mul"], (draw(4096, 20), draw(4096, 20))
    for _ in range(1000):
        budget.before(operation, args, {})


def test_pairs_of_a_thousand_positions_fit_the_budget() -> None:
    pairs = of(method("column", "unsqueeze", L, 1), node("x", "operator.sub", L, ref("column")))
    assert float(run(pairs, 1000)) == pytest.approx(0, abs=1)


def test_every_name_on_the_list_has_its_callable() -> None:
    assert CALL_FUNCTION.keys() == FUNCTIONS.keys()
    assert CALL_METHOD.keys() == METHODS.keys()
    assert all(callable(each.call) for each in (*CALL_FUNCTION.values(), *CALL_METHOD.values()))


def test_nothing_on_the_list_works_in_place_or_leaves_torch() -> None:
    for name in METHODS:
        assert not name.endswith("_")
        assert name not in {"item", "numpy", "tolist", "backward", "register_hook", "set", "apply", "map"}


X, M = draw(6, 5), draw(6, 5, seed=1)
INDICES: list[Any] = [
    0, slice(1, 4), None, Ellipsis, (0, 1), (slice(None), 2), (..., 0), (None, ..., slice(0, 2)),
    X > 0, (X > 0)[:, 0], (slice(None), (X > 0)[0]), torch.tensor([0, 0, 5, 2]), torch.tensor(3),
    (torch.tensor([[0], [1]]), torch.tensor([0, 1, 2])), (torch.tensor([0, 1]), 2),
    (..., torch.tensor([0] * 40)), (None, torch.tensor([1, 2, 3])), ((X > 0)[:, 0], 1),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=range(len(INDICES)))
def test_the_size_of_what_an_index_chooses_is_known_before(index: Any) -> None:
    assert X[index].numel() <= largest_size("getitem", (X, index), {})


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("torch.zeros", (3, 4), {}), ("torch.zeros", ((3, 4),), {}), ("torch.ones", (), {"size": (2, 2)}),
    ("torch.full", ((3, 4), 7), {}), ("torch.full", (), {"size": (9,), "fill_value": 1}),
    ("torch.arange", (7,), {}), ("torch.arange", (2, 7), {}), ("torch.arange", (7, 2, -2), {}),
    ("torch.cat", ([X, M],), {}), ("torch.stack", ((X, M, X),), {"dim": 1}),
    ("operator.add", (X[:, None], M[None]), {}), ("torch.where", (X > 0, X[:, :1], M[:1]), {}),
    ("torch.gather", (X, 1, torch.zeros(6, 5, dtype=torch.int64)), {}), ("torch.reshape", (X, (-1,)), {}),
    ("torch.sort", (X,), {}), ("torch.zeros_like", (X,), {}), ("torch.tril", (X,), {}),
    (".repeat", (X, 2, 3, 1), {}), (".repeat", (X, (4, 1)), {}), (".new_zeros", (X, 3, 4), {}),
    (".new_full", (X, (3, 4), 1.0), {}), (".new_full", (X,), {"size": (5,), "fill_value": 1.0}),
    (".expand_as", (X[:1], M), {}), (".masked_fill", (X, M > 0, 0.0), {}), (".lerp", (X, M, 0.5), {}),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=[f"{i}{call[0]}" for i, call in enumerate(CALLS)])
def test_the_size_of_what_a_call_makes_is_known_before(
    call: tuple[str, tuple[Any, ...], dict[str, Any]],
) -> None:
    target, args, kwargs = call
    operation = CALL_METHOD[target[1:]] if target.startswith(".") else CALL_FUNCTION[target]
    made = max(tensor.numel() for tensor in tensors_in(operation.call(*args, **kwargs)))
    assert made <= largest_size(operation.name, args, kwargs)
