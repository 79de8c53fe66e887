"""Loss of one request over some or all of its datums: value, metrics, and gradients of the logprobs.

All of it stays on the device: a read by the host would wait for the work queued there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from skyrl_tinker.domain.values import Failure
from skyrl_tinker.errors import UserError
from skyrl_tinker.training.batching.batch import RequestInfo, TrainingInputBatch
from skyrl_tinker.training.batching.packed_row import Row, Span
from skyrl_tinker.training.losses import LOSS_FUNCTIONS
from skyrl_tinker.training.losses.base import LossContext, LossTerms


@dataclass(frozen=True, slots=True)
class RequestLoss:
    """Result of one loss. `upstream` [n]: d loss / d logprobs, zero without a backward pass or on failure.

    `finite`: bool scalar; where it is false, `explain` names the fault. `failure`: one that is known already.
    """

    upstream: torch.Tensor
    finite: torch.Tensor
    metrics: Mapping[str, torch.Tensor]  # scalars, as PassMetrics
    explain: Callable[[], Failure]
    failure: Failure | None = None


def row_loss(
    batch: TrainingInputBatch,
    row: Row,
    span: Span,
    logprobs: torch.Tensor,
    seed: int,
    backward: bool,
    seconds: float,
) -> RequestLoss:
    """Compute the loss of the request `span` over its datums in the row; logprobs [n] are those of the span.

    `seconds`: time limit of a custom loss.
    """
    segments = [datum.owner for datum in row.datums if span.start <= datum.start < span.stop]
    inputs = {name: values[span.part] for name, values in row.inputs.items()}
    return _score(batch, segments, logprobs, inputs, seed, backward, seconds)


def whole_loss(batch: TrainingInputBatch, request: int, logprobs: torch.Tensor, seed: int) -> RequestLoss:
    """Compute the loss over all datums of the request, in order; logprobs [C] are those of the batch."""
    segments = batch.segments_of(request)
    parts = [batch.cells_of(segment) for segment in segments]
    cells = np.concatenate([np.arange(part.start, part.stop) for part in parts])
    inputs = {
        name: torch.from_numpy(values[cells]).to(logprobs.device) for name, values in batch.inputs.items()
    }
    cell_logprobs = logprobs[torch.from_numpy(cells).to(logprobs.device)]
    return _score(batch, segments, cell_logprobs, inputs, seed, batch.requests[request].backward)


def _score(
    batch: TrainingInputBatch,
    segments: list[int],
    logprobs: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    seed: int,
    backward: bool,
    seconds: float = math.inf,
) -> RequestLoss:
    info = batch.requests[batch.request[segments[0]]]
    leaf = logprobs.detach().requires_grad_(backward)
    try:
        with torch.set_grad_enabled(backward):
            context = _context(batch, info, segments, inputs, seed, seconds)
            terms = LOSS_FUNCTIONS[info.loss_fn](leaf, context)
        upstream = _gradient(terms, leaf) if backward else torch.zeros_like(leaf)
    except UserError as error:  # a custom loss beyond its bounds
        return _refused(logprobs, Failure(str(error), error.category))
    loss = terms.values.detach().sum(dtype=torch.float64)
    finite = loss.isfinite() & upstream.isfinite().all()
    return RequestLoss(
        upstream.where(finite, 0.0),
        finite,
        {"loss:sum": loss, **terms.metrics},
        partial(_not_finite, batch, info, segments, leaf.detach(), terms.values.detach(), upstream),
    )


def _refused(logprobs: torch.Tensor, failure: Failure) -> RequestLoss:
    none = torch.zeros((), dtype=torch.bool, device=logprobs.device)
    return RequestLoss(torch.zeros_like(logprobs), none, {}, lambda: failure, failure)


def _context(
    batch: TrainingInputBatch,
    info: RequestInfo,
    segments: list[int],
    inputs: Mapping[str, torch.Tensor],
    seed: int,
    seconds: float,
) -> LossContext:
    spec = info.loss
    device = next((values.device for values in inputs.values()), torch.device("cpu"))
    return LossContext(
        inputs={name: inputs[name] for name in (*spec.inputs, *spec.optional, *spec.recorded)},
        shapes=tuple(batch.shapes[segment] for segment in segments),
        config=info.loss_config,
        seed=seed,
        custom=info.custom,
        seconds=seconds,
        custom_inputs=tuple(
            {name: torch.tensor(values, device=device) for name, values in batch.custom_inputs[index].items()}
            for index in segments
            if index in batch.custom_inputs
        ),
    )


def _gradient(terms: LossTerms, leaf: torch.Tensor) -> torch.Tensor:
    """Return d loss / d logprobs; zero where the loss does not depend on them."""
    if not terms.values.requires_grad:
        return torch.zeros_like(leaf)
    ones = torch.ones_like(terms.values)
    (gradient,) = torch.autograd.grad(terms.values, leaf, ones, materialize_grads=True)
    return gradient


def _not_finite(
    batch: TrainingInputBatch,
    info: RequestInfo,
    segments: list[int],
    logprobs: torch.Tensor,
    values: torch.Tensor,
    upstream: torch.Tensor,
) -> Failure:
    """Name the first datum at fault, and the position in it."""
    if not logprobs.isfinite().all():
        cell = int((~logprobs.isfinite()).int().argmax())
        return Failure(
            f"{_place(batch, segments, cell)}: expected a finite logprob, found {float(logprobs[cell])}: the "
            "weights of this model have diverged, load an earlier checkpoint; the request left no gradients",
            "user",
        )
    if len(values) == len(upstream):
        cell = int((~(values.isfinite() & upstream.isfinite())).int().argmax())
        finding = f"loss {float(values[cell])}, gradient {float(upstream[cell])}"
        place = _place(batch, segments, cell)
    else:  # one value per datum
        gradients = torch.split(upstream, [math.prod(batch.shapes[segment]) for segment in segments])
        sound = torch.stack([each.isfinite().all() for each in gradients]) & values.isfinite()
        index = int((~sound).int().argmax())
        cell = int((~gradients[index].isfinite()).int().argmax())
        finding = f"loss {float(values[index])}, gradient {float(gradients[index][cell])}"
        place = f"datum {batch.datum[segments[index]]}"
    return Failure(
        f"{place}: expected a finite {info.loss_fn} loss and gradient, found {finding}; "
        "the request left no gradients",
        "user",
    )


def _place(batch: TrainingInputBatch, segments: list[int], cell: int) -> str:
    for segment in segments:
        length, *candidates = batch.shapes[segment]
        size = length * math.prod(candidates)
        if cell < size:
            candidate = f", candidate {cell % candidates[0]}" if candidates else ""
            return f"datum {batch.datum[segment]}, position {cell // math.prod(candidates)}{candidate}"
        cell -= size
    raise AssertionError("a cell belongs to a datum")
