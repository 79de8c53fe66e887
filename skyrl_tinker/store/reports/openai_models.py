"""Models of the OpenAI routes: base models, and every checkpoint of sampler weights by its path."""

from sqlalchemy import Connection

from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import CheckpointKind, Reach
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.protocol.schemas.openai import FieldError
from skyrl_tinker.store import checkpoint_records, weight_versions
from skyrl_tinker.store.checkpoint_records import CheckpointRow


def find_weights(
    conn: Connection, reach: Reach, model: str, bases: Bases
) -> tuple[CheckpointRow, WeightVersion]:
    """Return the weights of a path.

    Raises NotFoundError, also for other names, and FieldError for another kind of checkpoint or base model.
    """
    if not model.startswith(tinker_path.SCHEME):
        raise NotFoundError(f"no model {model!r}: expected {bases.sampled}, or a tinker:// path")
    try:
        path = tinker_path.parse(model)
    except UserError as error:
        raise FieldError(f"model: {error}", "model") from error
    if path.kind is not CheckpointKind.SAMPLER_WEIGHTS:
        raise FieldError(str(checkpoint_records.no_sampler_weights(model)), "model")
    row = checkpoint_records.find(conn, reach, path.model_id, path.kind, path.name)
    version = weight_versions.published_version(conn, row.version_id) if row and row.version_id else None
    if row is None or version is None:
        raise checkpoint_records.not_found(model)
    try:
        checkpoint_records.require_base(row, bases)
    except UserError as error:
        raise FieldError(f"model: {error}", "model") from error
    return row, version
