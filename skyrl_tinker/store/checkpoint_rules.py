"""Rules on loading a checkpoint and on sampling from it, for the API and the engine. Pure: no connection."""

from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import NotFoundError, NotSupportedError, UserError
from skyrl_tinker.store.checkpoint_records import CheckpointRow


def not_found(path: str) -> NotFoundError:
    """Return the error for a path that leads to no checkpoint which the client may read."""
    return NotFoundError(
        f"no checkpoint {path}: it was never saved, it is deleted or expired, or it is another key's and "
        "not published"
    )


def require_resumable(row: CheckpointRow, *, optimizer: bool, max_lora_rank: int) -> None:
    """Raise UserError unless a model can be loaded from `row`, with its optimizer state if `optimizer`."""
    if row.kind is not CheckpointKind.WEIGHTS:
        raise UserError(f"{row.path} is of kind {row.kind}, expected weights (made by save_weights)")
    if row.spec.rank > max_lora_rank:
        raise UserError(
            f"{row.path} has LoRA rank {row.spec.rank}, "
            f"expected at most {max_lora_rank} (the server's setting max_lora_rank)"
        )
    if optimizer and not row.has_optimizer:
        raise UserError(
            f"{row.path} has no optimizer state: load it with optimizer=false "
            "(create_training_client_from_state)"
        )


def require_base(row: CheckpointRow, bases: Bases) -> BaseModelFacts:
    """Return the checkpoint's base model. Raises UserError unless it is one of `bases`."""
    facts = bases.find(row.base_model)
    if facts is None:
        raise UserError(f"{row.path} is of base model {row.base_model!r}, expected {bases}")
    return facts


def no_sampler_weights(path: str) -> NotSupportedError:
    """Return the error for a checkpoint that cannot be sampled from."""
    return NotSupportedError(
        f"{path} has no weights for sampling: expected a checkpoint made by save_weights_for_sampler"
    )
