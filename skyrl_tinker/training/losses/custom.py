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
    """Evaluate the client's function, summed over datums: loss = sum over d of f(logprobs_d, inputs_d).

    The function is interpreted on the CPU. Each datum's gradient is computed, and its memory freed, before
    the next datum. `values` are float32 [D], metrics float64.
    Raises UserError when the function fails or exceeds its limits (custom_bounds).
    """
    loss = context.custom
    assert loss is not None, "it is looked up when the request is read"
    program, deadline = read(loss), time.monotonic() + context.seconds
    sizes = [math.prod(shape) for shape in context.shapes]
    cells = torch.split(logprobs.detach().cpu(), sizes)
    evaluations = []
    for inputs, part, shape in zip(context.custom_inputs, cells, context.shapes, strict=True):
        leaf = part.reshape(shape).clone().requires_grad_(logprobs.requires_grad)
        try:
            arguments = _arguments(loss, leaf, inputs)
            evaluations.append(_evaluate(program, leaf, arguments, Budget(leaf.numel(), deadline)))
        except UserError as error:
            raise UserError(
                f"custom loss {loss.name!r}, with target_tokens of shape {shape}: {error}"
            ) from error
    values = torch.stack([evaluation.value for evaluation in evaluations]).to(logprobs.device)
    gradients = torch.cat([evaluation.gradient for evaluation in evaluations]).to(logprobs)
    owners = torch.repeat_interleave(torch.tensor(sizes)).to(logprobs.device)
    known: torch.Tensor = _Known.apply(logprobs, values, gradients, owners)  # type: ignore[no-untyped-call]
    return LossTerms(known, _summed(evaluations))


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """Result of one datum: value float32 [], gradient [cells] (zeros where none is needed), metrics."""

    value: torch.Tensor
    gradient: torch.Tensor
    metrics: Mapping[str, float]


class _Known(torch.autograd.Function):
    """Values [D] whose gradients [n] are already known; `owners` [n]: the datum of each cell."""

    @staticmethod
    def forward(
        ctx: Any, logprobs: torch.Tensor, values: torch.Tensor, gradients: torch.Tensor, owners: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gradients, owners)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, owners = ctx.saved_tensors
        return upstream[0][owners] * gradients, None, None, None


def _arguments(loss: CustomLoss, logprobs: torch.Tensor, inputs: Inputs) -> list[torch.Tensor]:
    """Put the inputs in the function's order. Raises UserError for one that is missing or of another rank."""
    given = {name: values.cpu() for name, values in inputs.items()} | {"logprobs": logprobs}
    for name, rank in loss.inputs:
        if name not in given:
            raise UserError(f"loss_fn_inputs lacks {name!r}, found {sorted(inputs) or 'none'}")
        if given[name].ndim != rank:
            raise UserError(f"{name} has rank {given[name].ndim}, expected {rank}, as the loss declares")
    return [given[name] for name, _ in loss.inputs]


def _evaluate(
    program: Program, leaf: torch.Tensor, inputs: list[torch.Tensor], budget: Budget
) -> _Evaluation:
    loss, metrics = program.evaluate(inputs, budget)
    gradient = torch.zeros_like(leaf)
    if loss.requires_grad:
        try:
            (gradient,) = torch.autograd.grad(loss, leaf)
        except RuntimeError as error:
            raise UserError(f"its gradient cannot be computed: {error}") from error
    return _Evaluation(loss.detach().float(), gradient.flatten(), metrics)


def _summed(evaluations: list[_Evaluation]) -> dict[str, torch.Tensor]:
    return {
        key: torch.tensor([evaluation.metrics[key] for evaluation in evaluations], dtype=torch.float64).sum()
        for key in evaluations[0].metrics
    }
