"""Losses by name, one module each; names, inputs and config keys are those of `domain.loss_specs`.

In: logprobs of one request with its inputs and config. Out: the loss to differentiate, and metrics. Imports
`domain` only, so that a loss can be read, tested and added alone.
"""

from collections.abc import Mapping
from importlib import import_module

from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.training.losses.base import LossContext, LossFunction, LossTerms

__all__ = ["LOSS_FUNCTIONS", "LossContext", "LossFunction", "LossTerms"]

LOSS_FUNCTIONS: Mapping[str, LossFunction] = {
    name: getattr(import_module(f"{__name__}.{name}"), name) for name in LOSSES
}
