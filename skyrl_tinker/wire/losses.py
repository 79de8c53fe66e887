"""What each loss needs and accepts. Validation (API) and computation (workers) both read this one table."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ConfigKey:
    default: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class LossSpec:
    """`inputs`: float32 [N] arrays needed beside target_tokens."""

    name: str
    inputs: tuple[str, ...]
    config: Mapping[str, ConfigKey] = field(default_factory=dict)


_RL_INPUTS = ("logprobs", "advantages")

LOSSES: Mapping[str, LossSpec] = {
    spec.name: spec
    for spec in (
        LossSpec("cross_entropy", ("weights",)),
        LossSpec("importance_sampling", _RL_INPUTS),
        LossSpec(
            "ppo",
            _RL_INPUTS,
            {"clip_low_threshold": ConfigKey(0.8, 0.0, 1e6), "clip_high_threshold": ConfigKey(1.2, 0.0, 1e6)},
        ),
        LossSpec(
            "cispo",
            _RL_INPUTS,
            {"clip_low_threshold": ConfigKey(0.0, 0.0, 1e6), "clip_high_threshold": ConfigKey(4.0, 0.0, 1e6)},
        ),
    )
}

NOT_YET: tuple[str, ...] = ("dro", "gspo", "stable_reinforce", "custom")
"""Known to the SDK, refused until they are built."""
