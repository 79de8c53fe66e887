"""Limits of a custom loss per datum, and the size of a call's result, known before the call."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest

import torch

from skyrl_tinker.errors import UserError
from skyrl_tinker.training.losses.custom_ops import Arguments, Keywords, Operation, Value

MAX_DIMENSIONS = 8
TENSOR_ELEMENTS = (1 << 20, 16)
"""Largest tensor of a datum: (elements, elements per target), whichever is more."""
TOTAL_ELEMENTS = (1 << 24, 2048)
"""Elements that all calls of a datum touch, in the same form."""
TOTAL_BYTES = 1 << 30
"""Size of all results of a datum; the gradients may take as much again."""
SECONDS = 20.0
"""Time of one request in one pass, on each rank."""
ROW_SECONDS = 2 * SECONDS
"""Time of all requests in a row together: ranks that wait for this one give up after a minute."""


def seconds_left(spent: float, spent_on_row: float) -> float:
    """Return the seconds that a request may take in a row: at most half of the row's remaining seconds."""
    return min(SECONDS - spent, (ROW_SECONDS - spent_on_row) / 2)


class Budget:
    """Budget of one datum with `cells` targets. Raises UserError when it is used up."""

    def __init__(self, cells: int, deadline: float) -> None:
        """Start a budget; `deadline` is a time of time.monotonic()."""
        self._largest = _limit(TENSOR_ELEMENTS, cells)
        self._total = self._left = _limit(TOTAL_ELEMENTS, cells)
        self._bytes = TOTAL_BYTES
        self._deadline = deadline

    def before(self, operation: Operation, args: Arguments, kwargs: Keywords) -> None:
        size = largest_size(operation.name, args, kwargs)
        self._require_size(size)
        self._left -= size
        if self._left < 0:
            raise UserError(f"the loss touches more than {self._total} elements of one datum, the limit")
        if time.monotonic() > self._deadline:
            raise UserError(
                f"the loss takes more than {SECONDS:g} s for one request, the limit "
                "(lower when other custom losses share the row)"
            )

    def after(self, result: Value) -> None:
        """Charge a result; views too, since they cost nothing to make but something to read."""
        for tensor in tensors_in(result):
            self._require_size(tensor.numel())
            if tensor.ndim > MAX_DIMENSIONS:
                raise UserError(
                    f"a call made a tensor of {tensor.ndim} dimensions, expected at most {MAX_DIMENSIONS}"
                )
            self._bytes -= tensor.numel() * tensor.element_size()
        if self._bytes < 0:
            raise UserError(
                f"the loss makes tensors of more than {TOTAL_BYTES} bytes for one datum, the limit"
            )

    def _require_size(self, size: int) -> None:
        if size > self._largest:
            raise UserError(
                f"makes or reads up to {size} elements, expected at most {self._largest} for this datum"
            )


def _limit(limits: tuple[int, int], cells: int) -> int:
    least, per_cell = limits
    return max(least, per_cell * cells)


def largest_size(name: str, args: Arguments, kwargs: Keywords) -> int:
    """Bound the elements that a call of operation `name` reads or makes. UserError if there is no bound."""
    if name in _SIZES:
        return _SIZES[name](args, kwargs)
    shapes = [tensor.shape for tensor in tensors_in((*args, *kwargs.values()))]
    return max(sum(map(math.prod, shapes)), _broadcast(shapes))


def tensors_in(value: Value) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value, also those in tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def _broadcast(shapes: Iterable[Iterable[int]]) -> int:
    """Bound the elements of the shapes broadcast together, whether they fit or not."""
    columns = zip_longest(*(reversed(tuple(shape)) for shape in shapes), fillvalue=1)
    return math.prod(max(column) for column in columns)


def _product(value: Value) -> int:
    """Multiply sizes, given singly or in tuples; anything else counts as 1.

    Raises UserError for tensors, which torch would also accept as sizes.
    """
    if isinstance(value, torch.Tensor):
        raise UserError("found a tensor for a size, expected integers")
    if isinstance(value, tuple | list):
        return math.prod(map(_product, value))
    return max(0, value) if isinstance(value, int) else 1


def _sized(args: Arguments, kwargs: Keywords) -> int:
    return _product((args, kwargs.get("size")))


def _repeated(args: Arguments, kwargs: Keywords) -> int:
    count: int = args[0].numel()
    return count * _product((args[1:], kwargs.get("repeats")))


def _counted(args: Arguments, kwargs: Keywords) -> int:
    """Count for args: end, or start and end, or start, end and step."""
    if not all(isinstance(arg, int) for arg in args) or {"start", "end", "step"} & kwargs.keys():
        raise UserError("expected start, end and step by position, as integers")
    return len(range(*args))


def _indexed(args: Arguments, kwargs: Keywords) -> int:
    """Count for args: tensor or tuple, index. A mask chooses at most as many places as it has elements."""
    source, index = args
    if not isinstance(source, torch.Tensor):
        return 1
    items = index if isinstance(index, tuple) else (index,)
    position, taken, chosen = 0, 1, []
    for item in items:
        width = source.ndim - sum(map(_width, items)) if item is Ellipsis else _width(item)
        if isinstance(item, torch.Tensor):
            taken *= math.prod(source.shape[position : position + width])
            chosen.append((item.numel(),) if item.dtype is torch.bool else item.shape)
        position += width
    left: int = source.numel() // max(1, taken)
    return left * _broadcast(chosen) + sum(map(math.prod, chosen))


def _width(item: Value) -> int:
    """Count the dimensions that a part of an index takes, the ellipsis aside."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, torch.Tensor):
        return item.ndim if item.dtype is torch.bool else 1
    if isinstance(item, slice) or (isinstance(item, int) and not isinstance(item, bool)):
        return 1
    raise UserError(
        f"found {type(item).__name__} in an index, expected integers, slices, None, ... or tensors"
    )


_SIZES: Mapping[str, Callable[[Arguments, Keywords], int]] = {
    "zeros": _sized,
    "ones": _sized,
    "new_zeros": lambda args, kwargs: _sized(args[1:], kwargs),
    "new_ones": lambda args, kwargs: _sized(args[1:], kwargs),
    "full": lambda args, kwargs: _sized(args[:1], kwargs),
    "new_full": lambda args, kwargs: _sized(args[1:2], kwargs),
    "arange": _counted,
    "repeat": _repeated,
    "getitem": _indexed,
}
"""Operations whose result may be larger than their operands broadcast together."""
