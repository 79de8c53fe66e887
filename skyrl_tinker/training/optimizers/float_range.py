"""Range of float32, which weights and moments must not leave: a moment at infinity freezes a weight for ever.

Bounds on the host, from the global norm of the gradients, prove it for nearly every step without reading a
tensor.
"""

from collections.abc import Callable, Mapping

import torch

from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models.trainable_model import Part, TrainableModel

Bounds = Mapping[Part, float]
LARGEST = torch.finfo(torch.float32).max
_PROVEN = LARGEST / 2
"""Bound that leaves room for the rounding of any number of steps."""


def doubtful_parts(model: TrainableModel, after: Callable[[Bounds], Bounds], ranks: Ranks) -> list[Part]:
    """Return the parts that a step may push out of range; without any, keep the bounds after the step.

    `after`: (bounds before the step) -> those after it. Bounds that grew too large are measured anew. Every
    rank must call it.
    """
    if model.bounds is None or _beyond(after(model.bounds)):
        model.bounds = model.measure_bounds(ranks)
    bounds = after(model.bounds)
    doubtful = _beyond(bounds)
    if not doubtful:
        model.bounds = bounds
    return doubtful


def _beyond(bounds: Bounds) -> list[Part]:
    return [part for part, bound in bounds.items() if not bound <= _PROVEN]  # NaN is beyond, too
