"""manifest.json of a checkpoint: its contents and the checksum of each file. Imports no torch."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from skyrl_tinker.domain.values import LoraSpec, OptimizerFamily
from skyrl_tinker.errors import UserError

T = TypeVar("T")
FILE_NAME = "manifest.json"
FORMAT = 2


@dataclass(frozen=True, slots=True)
class FileEntry:
    sha256: str
    size: int  # bytes

    def __str__(self) -> str:
        return f"{self.size} bytes with SHA-256 {self.sha256[:16]}…"


@dataclass(frozen=True, slots=True)
class Manifest:
    """`optimizer`: the family whose state the checkpoint holds, None without one.

    Before the first step (`step` 0) that state is all zeros and has no file.
    """

    base_model: str  # directory of the base model
    spec: LoraSpec
    step: int  # optimizer steps taken
    optimizer: OptimizerFamily | None
    files: Mapping[str, FileEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """A checkpoint without its tensors: JSON files by name, and the manifest, which lists no files yet.

    Unnamed weights have no manifest: none is loaded to be trained. `writers`: number of the ranks
    that write, the first ones.
    """

    manifest: Manifest | None
    texts: Mapping[str, str]
    writers: int


def write_manifest(directory: Path, manifest: Manifest) -> None:
    _write(directory, asdict(manifest))


def write_listing(directory: Path) -> None:
    """Write a manifest.json that lists the files only, of weights that are sampled and never loaded."""
    files = [file for file in directory.iterdir() if file.name != FILE_NAME]  # of an earlier try
    _write(directory, {"files": {file.name: asdict(entry_of(file)) for file in files}})


def _write(directory: Path, contents: Mapping[str, Any]) -> None:
    text = json.dumps({"format": FORMAT, **contents}, indent=1, sort_keys=True)
    (directory / FILE_NAME).write_text(text + "\n")


def read_manifest(directory: str | Path) -> Manifest:
    """Read a checkpoint's manifest. Raises UserError when it is missing, damaged or of another format."""
    return _read(directory, _manifest)


def parse_manifest(text: bytes, path: str) -> Manifest:
    """Parse a checkpoint's manifest; `path` names it. Raises UserError as `read_manifest`."""
    return _parse(text, path, _manifest)


def read_listing(directory: Path) -> Mapping[str, FileEntry]:
    """Read the entries of any manifest.json. Raises UserError as `read_manifest`."""
    return _read(directory, _files)


def _manifest(raw: Mapping[str, Any]) -> Manifest:
    return Manifest(
        base_model=raw["base_model"],
        spec=LoraSpec(**raw["spec"]),
        step=raw["step"],
        optimizer=raw["optimizer"],
        files=_files(raw),
    )


def _files(raw: Mapping[str, Any]) -> Mapping[str, FileEntry]:
    return {name: FileEntry(**entry) for name, entry in raw["files"].items()}


def _read(directory: str | Path, parse: Callable[[Mapping[str, Any]], T]) -> T:
    path = Path(directory) / FILE_NAME
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no checkpoint at '{directory}': expected {FILE_NAME}, found none") from None
    return _parse(text, str(path), parse)


def _parse(text: bytes, path: str, parse: Callable[[Mapping[str, Any]], T]) -> T:
    try:
        raw = json.loads(text)
        if (version := raw.get("format")) != FORMAT:
            raise UserError(f"'{path}': expected checkpoint format {FORMAT}, found {version}: save it again")
        return parse(raw)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"'{path}' is damaged: {error!r}") from error


def entry_of(path: Path) -> FileEntry:
    with path.open("rb") as file:
        return FileEntry(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def verify_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise UserError naming the first of these files whose checksum is not the manifest's."""
    for name in names:
        path, expected = directory / name, manifest.files[name]
        entry = entry_of(path) if path.is_file() else None
        if entry != expected:
            raise UserError(
                f"checkpoint '{directory}' is damaged: {name}: found {entry or 'none'}, expected {expected}; "
                "bring that file back from a copy, or use another checkpoint"
            )
