"""What named checkpoints of every kind need: a name that is free, and a directory."""

from pathlib import Path

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.errors import UserError
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store


def free_directory(root: Path, model: ModelRow, path: TinkerPath, request: int) -> Path:
    """Where a checkpoint goes. A directory is never written twice: an overwritten one may still be read."""
    directory = root / str(model.key) / path.kind / path.name
    return directory.with_name(f"{path.name}~{request}") if directory.exists() else directory


async def require_free(store: Store, path: TinkerPath) -> None:
    with store.read() as conn:
        taken = checkpoint_records.find_of_any_owner(conn, path.model_id, path.kind, path.name)
    if taken is not None:
        replacing = ", or save with overwrite" if path.kind is CheckpointKind.WEIGHTS else ""
        raise UserError(f"checkpoint {path} exists: choose another name or delete it{replacing}")
