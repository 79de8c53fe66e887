"""Custom losses as clients make them: traced and encoded by the real SDK, checked by our API."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from skyrl_tinker.domain.values import CustomLoss
from skyrl_tinker.protocol.custom_loss import check_custom_loss
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.losses import CreateCustomLossRequest
from skyrl_tinker.training.losses.base import LossContext, LossTerms
from skyrl_tinker.training.losses.custom import custom

Function = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
Inputs = Mapping[str, torch.Tensor]


def upload(function: Function, **ranks: int) -> CustomLoss:
    """The server's stored form of `function`, read from the wire."""
    handle = trace_loss(function, ranks, "session")  # type: ignore[arg-type]
    inputs = [each.model_dump() for each in handle.inputs]
    return checked(handle.name, inputs, encode_graph(handle).model_dump()["nodes"])


def checked(name: str, inputs: Sequence[Any], nodes: Sequence[Any]) -> CustomLoss:
    payload = {
        "session_id": "session",
        "custom_loss_seq_id": 0,
        "name": name,
        "inputs": inputs,
        "graph": {"format": 1, "nodes": nodes},
    }
    return check_custom_loss(parse(CreateCustomLossRequest, payload))


def compute(loss: CustomLoss, data: Sequence[tuple[torch.Tensor, Inputs]]) -> tuple[LossTerms, torch.Tensor]:
    """Terms and gradients [n] of the sum of the values; data: (logprobs, own inputs) per datum."""
    flat = torch.cat([logprobs.flatten() for logprobs, _ in data]).requires_grad_()
    terms = custom(flat, context(loss, data))
    (gradients,) = torch.autograd.grad(terms.values.sum(), flat, materialize_grads=True)
    return LossTerms(terms.values.detach(), terms.metrics), gradients


def context(loss: CustomLoss, data: Sequence[tuple[torch.Tensor, Inputs]]) -> LossContext:
    return LossContext(
        inputs={},
        shapes=tuple(tuple(logprobs.shape) for logprobs, _ in data),
        config={},
        seed=0,
        custom=loss,
        custom_inputs=tuple(own for _, own in data),
    )


def node(name: str, target: str, *args: Any, op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


LOGPROBS = {"name": "logprobs", "rank": 1}
PLACEHOLDER = node("logprobs", "logprobs", op="placeholder")


def by_hand(*calls: dict[str, Any], result: str = "total") -> CustomLoss:
    """A loss of `logprobs` [N] whose calls no tracer would have made: the last, `total`, is summed up."""
    output = node("output", "output", {"tuple": [ref(result), {"dict": {}}]}, op="output")
    return checked("by_hand", [LOGPROBS], [PLACEHOLDER, *calls, output])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 31 * math.prod(shape)))
