"""Losses by name, one module each; names, inputs and config keys are those of `domain.loss_specs`.

In: logprobs of one request with its inputs and config. Out: the loss to differentiate, and metrics. Imports
`domain` only, so that a loss can be read, tested and added alone.
"""

from collections.abc import Mapping

from skyrl_tinker.training.losses.base import LossContext, LossFunction, LossTerms
from skyrl_tinker.training.losses.cispo import cispo
from skyrl_tinker.training.losses.clip_cov import clip_cov
from skyrl_tinker.training.losses.cross_entropy import cross_entropy
from skyrl_tinker.training.losses.custom import custom
from skyrl_tinker.training.losses.dro import dro
from skyrl_tinker.training.losses.dual_clip import dual_clip
from skyrl_tinker.training.losses.gspo import gspo
from skyrl_tinker.training.losses.importance_sampling import importance_sampling
from skyrl_tinker.training.losses.kl_cov import kl_cov
from skyrl_tinker.training.losses.ppo import ppo
from skyrl_tinker.training.losses.regular import regular
from skyrl_tinker.training.losses.sapo import sapo
from skyrl_tinker.training.losses.stable_reinforce import stable_reinforce

__all__ = ["LOSS_FUNCTIONS", "LossContext", "LossFunction", "LossTerms"]

LOSS_FUNCTIONS: Mapping[str, LossFunction] = {
    function.__name__: function
    for function in (
        cross_entropy,
        importance_sampling,
        ppo,
        cispo,
        dro,
        gspo,
        stable_reinforce,
        regular,
        dual_clip,
        sapo,
        clip_cov,
        kl_cov,
        custom,
    )
}
