"""Operations of custom losses: callables behind the names of domain.custom_loss_ops, safe to call.

Everything runs on the CPU: there an index out of range is an error of one request, on a GPU the end of the
process. Calls that could end the process here, or escape the list, are refused.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional

from skyrl_tinker.domain.custom_loss_ops import FUNCTIONS, METHODS
from skyrl_tinker.errors import UserError

Value = Any
"""A tensor, a number, None, a size, dtype, device or part of an index, or a tuple or list of such."""
Arguments = tuple[Value, ...]
Keywords = Mapping[str, Value]
Number = bool | int | float

_MODULES: Mapping[str, ModuleType] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "operator": operator,
    "math": math,
}
_DIVISIONS = frozenset({"floordiv", "mod", "floor_divide", "fmod", "remainder"})
_MAX_EXPONENT = 64


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation; `name` has no module. A method is called with its tensor first."""

    name: str
    call: Callable[..., Value]

    def check(self, args: Arguments, kwargs: Keywords) -> None:
        """Raise UserError for arguments that torch would accept, but that are not safe."""
        if self.name != "to" and any(isinstance(arg, torch.dtype) for arg in args):
            # `view` would read the bytes of one type as another
            raise UserError("found a dtype among the positional arguments, expected it as a keyword")
        divides = self.name in _DIVISIONS or (self.name == "div" and kwargs.get("rounding_mode") is not None)
        operands = (*args, *kwargs.values())
        if (
            divides
            and any(isinstance(operand, torch.Tensor) for operand in operands)
            and not any(map(_is_float, operands))
        ):
            # -2**63 / -1 ends the process: the processor traps
            raise UserError("found a division of integers, expected floats: make them with .float()")


def _is_float(value: Value) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)


def _attribute(value: Value, name: str) -> Value:
    """Get a checked attribute: tensors have shape etc., results of sort and max have values and indices."""
    if isinstance(value, torch.Tensor) == (name in ("values", "indices")):
        raise UserError(f"found {type(value).__name__}, which has no attribute {name!r}")
    return getattr(value, name)


def _item(value: Value, index: Value) -> Value:
    if not isinstance(value, torch.Tensor | tuple):
        raise UserError(f"found {type(value).__name__}, expected a tensor or tuple to index")
    return value[index]


def _arithmetic(function: Callable[..., Value]) -> Callable[..., Value]:
    """Restrict to tensors and numbers: Python's operators on strings and lists would grow without bound."""

    def call(*args: Value) -> Value:
        for arg in args:
            if not isinstance(arg, torch.Tensor | Number):
                raise UserError(f"found {type(arg).__name__}, expected a tensor or number")
        return function(*args)

    return call


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > _MAX_EXPONENT:
        raise UserError(f"found the exponent {exponent}, expected at most {_MAX_EXPONENT} between integers")
    return operator.pow(base, exponent)


def _numeric(function: Callable[..., Value]) -> Callable[..., Value]:
    """Restrict to numbers: a tensor would lose its gradient."""

    def call(*args: Value) -> Value:
        for arg in args:
            if not isinstance(arg, Number):
                raise UserError(f"found {type(arg).__name__}, expected a number: for tensors there is torch")
        return function(*args)

    return call


def _function(target: str) -> Callable[..., Value]:
    if target in _SPECIAL:
        return _SPECIAL[target]
    module, _, name = target.rpartition(".")
    function: Callable[..., Value] = getattr(_MODULES[module], name)
    return _WRAPPED[module](function) if module in _WRAPPED else function


_SPECIAL: Mapping[str, Callable[..., Value]] = {
    "getattr": _attribute,
    "operator.getitem": _item,
    "operator.pow": _arithmetic(_power),
}
_WRAPPED: Mapping[str, Callable[[Callable[..., Value]], Callable[..., Value]]] = {
    "operator": _arithmetic,
    "math": _numeric,
}

CALL_FUNCTION: Mapping[str, Operation] = {
    target: Operation(target.rpartition(".")[2], _function(target)) for target in FUNCTIONS
}
CALL_METHOD: Mapping[str, Operation] = {
    name: Operation(name, getattr(torch.Tensor, name)) for name in METHODS
}
