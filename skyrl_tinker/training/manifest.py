"""manifest.json of a checkpoint: what it holds and the checksum of each file. Free of torch."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from skyrl_tinker.errors import UserError
from skyrl_tinker.wire.values import LoraSpec

FILE_NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class FileEntry:
    sha256: str
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    base_model: str  # directory of the base model
    spec: LoraSpec
    step: int  # optimizer steps taken
    has_optimizer: bool
    files: Mapping[str, FileEntry]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1, sort_keys=True)
    (directory / FILE_NAME).write_text(text + "\n")


def read_manifest(directory: str | Path) -> Manifest:
    """Raises UserError when there is none or it is of another format."""
    path = Path(directory) / FILE_NAME
    try:
        raw = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no checkpoint at {directory}: expected {FILE_NAME}, found none") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if raw.get("format") != FORMAT:
        raise UserError(f"{path}: expected checkpoint format {FORMAT}, found {raw.get('format')}")
    return Manifest(
        base_model=raw["base_model"],
        spec=LoraSpec(**raw["spec"]),
        step=raw["step"],
        has_optimizer=raw["has_optimizer"],
        files={name: FileEntry(**entry) for name, entry in raw["files"].items()},
    )


def entry_of(path: Path) -> FileEntry:
    with path.open("rb") as file:
        return FileEntry(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Raises UserError naming the first file whose checksum is not the manifest's."""
    for name, expected in manifest.files.items():
        path = directory / name
        found = entry_of(path) if path.is_file() else None
        if found != expected:
            raise UserError(f"checkpoint {directory} is damaged: {name}: expected {expected}, found {found}")
