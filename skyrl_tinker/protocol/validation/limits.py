"""What this server can take."""

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_tinker.errors import UserError


@dataclass(frozen=True, slots=True)
class Limits:
    """`base_models`: the names under which the one base model is served, the canonical one first.

    `max_targets`: target tokens of one forward_backward, all candidates of all datums counted.
    """

    vocab_size: int
    context_length: int
    max_datums: int
    base_models: tuple[str, ...]
    max_lora_rank: int
    max_targets: int = 1 << 22


def validate_base_model(name: str, limits: Limits) -> str:
    """Returns the name. Raises UserError that lists what is served."""
    if name not in limits.base_models:
        raise UserError(
            f"base_model is {name!r}, expected one that is served: {', '.join(limits.base_models)}"
        )
    return name


def check_ids(ids: Sequence[int], field: str, vocab_size: int, lowest: int = 0) -> None:
    """Raises UserError that names the first id which is not in [lowest, vocab_size)."""
    if min(ids, default=0) < lowest or max(ids, default=0) >= vocab_size:
        index, found = next((i, token) for i, token in enumerate(ids) if not lowest <= token < vocab_size)
        raise UserError(f"{field}[{index}] is {found}, expected a token id in [{lowest}, {vocab_size})")
