import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from skyrl_tinker.domain.values import CustomLoss
from skyrl_tinker.errors import UserError
from skyrl_tinker.training.losses.base import Inputs, LossContext, LossTerms
from skyrl_tinker.training.losses.custom_bounds import Budget
from skyrl_tinker.training.losses.custom_graph import Program, read


def custom(logprobs: torch.Tensor, context: LossContext) -> LossTerms:
    """The client's own function, summed over datums: loss = sum over d of f(logprobs_d, inputs_d).

    It is run as data, on the CPU, datum by datum, each with its gradient before the next begins, so that what
    one needs is freed before the next. `values` are float32 [D], metrics float64.
    Raises UserError when the function fails or takes too much (custom_bounds).
    """
    loss = context.custom
    assert loss is not None, "whoever reads the request looks its loss up"
    program, deadline = read(loss), time.monotonic() + context.seconds
    sizes = [math.prod(shape) for shape in context.shapes]
    cells = torch.split(logprobs.detach().cpu(), sizes)
    found = []
    for own, part, shape in zip(context.own_inputs, cells, context.shapes, strict=True):
        leaf = part.reshape(shape).clone().requires_grad_(logprobs.requires_grad)
        try:
            found.append(_evaluate(program, leaf, _inputs(loss, leaf, own), Budget(leaf.numel(), deadline)))
        except UserError as error:
            raise UserError(
                f"custom loss {loss.name!r}, with target_tokens of shape {shape}: {error}"
            ) from error
    values = torch.stack([each.value for each in found]).to(logprobs.device)
    gradients = torch.cat([each.gradient for each in found]).to(logprobs)
    owners = torch.repeat_interleave(torch.tensor(sizes)).to(logprobs.device)
    known: torch.Tensor = _Known.apply(logprobs, values, gradients, owners)  # type: ignore[no-untyped-call]
    return LossTerms(known, _summed(found))


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """Of one datum: value float32 [], gradient [cells] (zeros where none is asked for), metrics."""

    value: torch.Tensor
    gradient: torch.Tensor
    metrics: Mapping[str, float]


class _Known(torch.autograd.Function):
    """Values [D] whose gradients [n] are known already; `owners` [n]: the datum of each cell."""

    @staticmethod
    def forward(
        ctx: Any,
        logprobs: torch.Tensor,
        values: torch.Tensor,
        gradients: torch.Tensor,
        owners: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(gradients, owners)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, owners = ctx.saved_tensors
        return upstream[0][owners] * gradients, None, None, None


def _inputs(loss: CustomLoss, logprobs: torch.Tensor, own: Inputs) -> list[torch.Tensor]:
    """In the order in which the function takes them. Raises UserError for a missing one or another rank."""
    given = {name: values.cpu() for name, values in own.items()} | {"logprobs": logprobs}
    for name, rank in loss.inputs:
        if name not in given:
            raise UserError(f"loss_fn_inputs lacks {name!r}, found {sorted(own) or 'none'}")
        if given[name].ndim != rank:
            raise UserError(f"{name} has rank {given[name].ndim}, expected {rank}, as the loss declares")
    return [given[name] for name, _ in loss.inputs]


def _evaluate(program: Program, leaf: torch.Tensor, inputs: list[torch.Tensor], budget: Budget) -> _Evaluated:
    loss, metrics = program.run(inputs, budget)
    gradient = torch.zeros_like(leaf)
    if loss.requires_grad:
        try:
            (gradient,) = torch.autograd.grad(loss, leaf)
        except RuntimeError as error:
            raise UserError(f"its gradient cannot be computed: {error}") from error
    return _Evaluated(loss.detach().float(), gradient.flatten(), metrics)


def _summed(found: list[_Evaluated]) -> dict[str, torch.Tensor]:
    keys = found[0].metrics
    return {key: _sum([each.metrics[key] for each in found]) for key in keys}


def _sum(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).sum()
