"""What this server can take."""

from dataclasses import dataclass

from skyrl_tinker.errors import UserError


@dataclass(frozen=True, slots=True)
class Limits:
    """`base_models`: the names under which the one base model is served, the canonical one first."""

    vocab_size: int
    context_length: int
    max_datums: int
    base_models: tuple[str, ...]
    max_lora_rank: int


def validate_base_model(name: str, limits: Limits) -> str:
    """Returns the name. Raises UserError that lists what is served."""
    if name not in limits.base_models:
        raise UserError(
            f"base_model is {name!r}, expected one that is served: {', '.join(limits.base_models)}"
        )
    return name
