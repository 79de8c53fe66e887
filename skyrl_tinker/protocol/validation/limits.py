"""Limits of this server, and checks of names and ids against them."""

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_tinker.domain.sampler_abilities import ALL_ABILITIES, SamplerAbilities
from skyrl_tinker.errors import UserError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests. `base_models`: names of the one base model, the canonical one first.

    `max_targets`: target tokens of one forward_backward, all candidates of all datums counted.
    """

    vocab_size: int
    context_length: int
    max_datums: int
    base_models: tuple[str, ...]
    max_lora_rank: int
    max_targets: int = 1 << 22
    sampler: SamplerAbilities = ALL_ABILITIES


def validate_base_model(name: str, limits: Limits) -> str:
    """Return the name. Raises UserError that names the served model."""
    if name not in limits.base_models:
        raise UserError(f"base_model is {name!r}, expected the one that is served: {limits.base_models[0]}")
    return name


def check_ids(ids: Sequence[int], field: str, vocab_size: int, lowest: int = 0) -> None:
    """Raise UserError that names the first id outside [lowest, vocab_size)."""
    if min(ids, default=0) < lowest or max(ids, default=0) >= vocab_size:
        index, token = next((i, token) for i, token in enumerate(ids) if not lowest <= token < vocab_size)
        raise UserError(f"{field}[{index}] is {token}, expected a token id in [{lowest}, {vocab_size})")
