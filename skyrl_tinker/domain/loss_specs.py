"""Inputs and config keys of each loss: one table for validation (API) and computation (workers)."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A number from `low` to `high`, both allowed."""

    default: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class LossSpec:
    """`inputs`: float32 arrays of the shape of target_tokens that the client sends beside them."""

    name: str
    inputs: tuple[str, ...]
    config: Mapping[str, ConfigKey] = field(default_factory=dict)
    optional: Mapping[str, float] = field(default_factory=dict)
    """Optional inputs, and the number that stands at every position of an absent one."""
    refuses_misspelt: bool = False
    """Whether inputs that the loss does not read are refused where an optional one is absent: they may be its
    misspelt name, and all tokens would count."""
    recorded: tuple[str, ...] = ()
    """Inputs that the engine fills in from the record of the sample."""
    candidates: bool = False
    """Whether target_tokens may be [N, K]."""
    whole_request: bool = False
    """Whether the loss needs all datums of a request at once, not one by one."""


CUSTOM = "custom"
"""The loss of a client, which reads all inputs that are sent."""
_RL_INPUTS = ("logprobs", "advantages")
_MOST = 1e6
"""The losses rely on this bound and on the least temperature of `sapo`: see FAR in training.losses.base."""


def _thresholds(low: float, high: float) -> Mapping[str, ConfigKey]:
    return {
        "clip_low_threshold": ConfigKey(low, 0.0, _MOST),
        "clip_high_threshold": ConfigKey(high, 0.0, _MOST),
    }


_EPSILONS = {"eps_low": ConfigKey(0.2, 0.0, 1.0), "eps_high": ConfigKey(0.2, 0.0, _MOST)}

LOSSES: Mapping[str, LossSpec] = {
    spec.name: spec
    for spec in (
        LossSpec("cross_entropy", (), {}, {"weights": 1.0}, True, candidates=True),
        LossSpec("importance_sampling", _RL_INPUTS),
        LossSpec("ppo", _RL_INPUTS, _thresholds(0.8, 1.2)),
        LossSpec("cispo", _RL_INPUTS, _thresholds(0.0, 4.0)),
        LossSpec("dro", _RL_INPUTS, {"beta": ConfigKey(0.05, 0.0, _MOST)}),
        # 3e-4 below and 4e-4 above 1: the paper's own (arXiv:2507.18071, section 5.1).
        LossSpec("gspo", _RL_INPUTS, _thresholds(0.9997, 1.0004), {"sequence_ratio_mask": 1.0}, True),
        LossSpec(
            "stable_reinforce",
            ("advantages",),
            {
                "kl_coeff": ConfigKey(0.01, 0.0, _MOST),
                "ratio_cap": ConfigKey(2.0, 1.0, _MOST),
                "mask_low": ConfigKey(0.5, 0.0, 1.0),
                "mask_high": ConfigKey(5.0, 1.0, _MOST),
            },
            recorded=("sampling_logprobs", "sampled"),
        ),
        LossSpec("regular", _RL_INPUTS, _EPSILONS),
        LossSpec("dual_clip", _RL_INPUTS, {**_EPSILONS, "clip_ratio_c": ConfigKey(3.0, 1.0, _MOST)}),
        LossSpec(
            "sapo",
            _RL_INPUTS,
            {"tau_pos": ConfigKey(1.0, 1e-3, _MOST), "tau_neg": ConfigKey(1.05, 1e-3, _MOST)},
        ),
        # Names and defaults of the next two are those of the authors' code (arXiv:2505.22617).
        LossSpec(
            "clip_cov",
            _RL_INPUTS,
            {
                **_EPSILONS,
                "clip_cov_ratio": ConfigKey(2e-4, 0.0, 1.0),
                "clip_cov_lb": ConfigKey(1.0, -_MOST, _MOST),
                "clip_cov_ub": ConfigKey(5.0, -_MOST, _MOST),
            },
            whole_request=True,
        ),
        LossSpec(
            "kl_cov",
            _RL_INPUTS,
            {"kl_cov_ratio": ConfigKey(2e-3, 0.0, 1.0), "ppo_kl_coef": ConfigKey(1.0, 0.0, _MOST)},
            whole_request=True,
        ),
        LossSpec(CUSTOM, (), candidates=True),
    )
}
