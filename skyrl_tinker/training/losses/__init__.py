"""The losses by name, one module each; names, inputs and config keys are those of wire.losses."""

from collections.abc import Mapping

from skyrl_tinker.training.losses.base import LossFunction, LossTerms
from skyrl_tinker.training.losses.cispo import cispo
from skyrl_tinker.training.losses.cross_entropy import cross_entropy
from skyrl_tinker.training.losses.importance_sampling import importance_sampling
from skyrl_tinker.training.losses.ppo import ppo

__all__ = ["LOSS_FUNCTIONS", "LossFunction", "LossTerms"]

LOSS_FUNCTIONS: Mapping[str, LossFunction] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
}
