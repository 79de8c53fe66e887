"""Interpreter of an uploaded loss, which is a list of calls. Nothing is compiled, evaluated or unpickled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skyrl_tinker.domain.custom_loss_ops import ALIASES, MAX_INT, NEUTRAL, public_name, returned
from skyrl_tinker.domain.values import CustomLoss
from skyrl_tinker.errors import UserError
from skyrl_tinker.training.losses.custom_bounds import Budget
from skyrl_tinker.training.losses.custom_ops import CALL_FUNCTION, CALL_METHOD, Number, Operation, Value

Values = Mapping[str, Value]  # of the nodes so far, by name
Argument = Callable[[Values], Value]

_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)
"""Errors that torch and Python raise for arguments that do not fit."""
_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    target: str
    operation: Operation
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]


@dataclass(frozen=True, slots=True)
class Program:
    """Program of a loss. `inputs`: names of the input nodes, `logprobs` first; `metrics`: nodes by key."""

    inputs: tuple[str, ...]
    calls: tuple[Call, ...]
    loss: str
    metrics: Mapping[str, str]

    def evaluate(
        self, inputs: Sequence[torch.Tensor], budget: Budget
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute loss (a scalar, float) and metrics of one datum. UserError names the node at fault."""
        budget.after(tuple(inputs))
        values: dict[str, Value] = dict(zip(self.inputs, inputs, strict=True))
        for call in self.calls:
            try:
                values[call.name] = _result(call, values, budget)
            except (UserError, *_FAILURES) as error:
                reason = str(error).split("\n")[0][:_MESSAGE]
                raise UserError(f"node {call.name!r} ({call.target}): {reason}") from error
        metrics = {key: _metric(key, values[name]) for key, name in self.metrics.items()}
        return _loss(values[self.loss]), metrics


def read(loss: CustomLoss) -> Program:
    """Build the program of `loss`, which was checked by protocol.custom_loss."""
    *nodes, output = loss.nodes
    results = returned(output["args"])
    assert results is not None, "checked"
    result, metrics = results
    return Program(
        inputs=tuple(node["name"] for node in nodes if node["op"] == "placeholder"),
        calls=tuple(_call(node) for node in nodes if node["op"] != "placeholder"),
        loss=result["ref"],
        metrics={key: value["ref"] for key, value in metrics.items()},
    )


def _call(node: Mapping[str, Any]) -> Call:
    if node["op"] == "call_method":
        target, operation = node["target"], CALL_METHOD[node["target"]]
    else:
        target = public_name(node["target"])
        operation = CALL_FUNCTION[target]
    kwargs = {
        ALIASES.get(key, key): _argument(value) for key, value in node["kwargs"].items() if key not in NEUTRAL
    }
    return Call(node["name"], target, operation, tuple(map(_argument, node["args"])), kwargs)


def _argument(value: Any) -> Argument:
    """Return a function that computes an argument from the values of the previous nodes."""
    match value:
        case {"ref": name}:
            return lambda values: values[name]
        case {"tuple": items}:
            members = tuple(map(_argument, items))
            return lambda values: tuple(member(values) for member in members)
        case list():
            entries = tuple(map(_argument, value))
            return lambda values: [entry(values) for entry in entries]
        case {"slice": parts}:
            bounds = tuple(map(_argument, parts))
            return lambda values: slice(*(bound(values) for bound in bounds))
    constant = _constant(value)
    return lambda values: constant


def _constant(value: Any) -> Value:
    match value:
        case {"ellipsis": True}:
            return Ellipsis
        case {"float": text}:
            return float(text)
        case {"dtype": name}:
            return getattr(torch, name)
        case {"device": name}:
            return torch.device(name)
    return value


def _result(call: Call, values: Values, budget: Budget) -> Value:
    args = tuple(argument(values) for argument in call.args)
    kwargs = {key: argument(values) for key, argument in call.kwargs.items()}
    call.operation.check(args, kwargs)
    budget.before(call.operation, args, kwargs)
    result = call.operation.call(*args, **kwargs)
    _check_type(result)
    budget.after(result)
    return result


def _check_type(result: Value) -> None:
    """Check that an operation returned only values that other operations accept."""
    if isinstance(result, tuple):
        for item in result:
            _check_type(item)
    elif not isinstance(result, torch.Tensor | Number | torch.dtype | torch.device):
        raise UserError(f"made {type(result).__name__}, expected tensors and numbers")
    elif isinstance(result, int) and abs(result) > MAX_INT:
        raise UserError("made an integer of more than 64 bits")


def _loss(value: Value) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.ndim or not value.is_floating_point():
        raise UserError(f"the loss is {_described(value)}, expected a tensor without dimensions, of floats")
    return value


def _metric(key: str, value: Value) -> float:
    if isinstance(value, Number):
        return float(value)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise UserError(f"metric {key!r} is {_described(value)}, expected one number")
    return float(value.detach())


def _described(value: Value) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    return f"of type {type(value).__name__}"
