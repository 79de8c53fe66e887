"""The files of an export: what the trainer wrote, put so that it means the same elsewhere."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_tinker.domain.manifest import FILE_NAME, Manifest, entry_of, read_manifest, write_manifest
from skyrl_tinker.domain.peft_config import ADAPTER_CONFIG_FILE
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.protocol import age_encryption
from skyrl_tinker.weight_sync.adapter_files import flush

CONFIG_FILE = "config.json"
_SMALL = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})
_NOTICES = ("LICENSE", "NOTICE")


@dataclass(frozen=True, slots=True)
class Export:
    """What the weights belong to, `dtype` of full ones, and whom they are encrypted for."""

    facts: BaseModelFacts
    spec: LoraSpec
    dtype: str
    recipients: Sequence[str] = ()


def finish_export(export: Export, staging: Path, directory: Path) -> int:
    """From the trainer's checkpoint in `staging` to an export in `directory`, which appears complete.

    Its manifest names the files that are to be downloaded. Returns their bytes. Raises OSError.
    """
    written = read_manifest(staging)
    if export.spec.rank:
        _name_base(staging / ADAPTER_CONFIG_FILE, export.facts.names[0])
    else:
        _add_base_files(Path(export.facts.directory), staging, export.dtype)
    if export.recipients:
        for file in _files(staging):
            age_encryption.encrypt(file, export.recipients)
    size = _describe(export, staging, written)
    staging.rename(directory)
    flush(directory.parent)
    return size


def _files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.iterdir() if file.name != FILE_NAME)


def _name_base(config_file: Path, name: str) -> None:
    """PEFT finds the base model by it: a directory of this server's is nowhere else."""
    config = json.loads(config_file.read_text())
    _write_json(config_file, config | {"base_model_name_or_path": name})


def _add_base_files(base: Path, staging: Path, dtype: str) -> None:
    """Of the base model all but its weights; config.json names the dtype that the weights have here."""
    for file in base.iterdir():
        if file.is_file() and _goes_along(file.name):
            shutil.copyfile(file, staging / file.name)
    config = json.loads((staging / CONFIG_FILE).read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    _write_json(staging / CONFIG_FILE, config | {key: dtype})


def _goes_along(name: str) -> bool:
    if name == FILE_NAME or name.endswith(".index.json"):  # of other files than ours
        return False
    return Path(name).suffix in _SMALL or name.startswith(_NOTICES)


def _describe(export: Export, staging: Path, written: Manifest) -> int:
    """The manifest of the finished files; all of them are durable then. Returns their bytes."""
    changed = {ADAPTER_CONFIG_FILE, CONFIG_FILE}
    known = {name: entry for name, entry in written.files.items() if name not in changed}
    entries = {file.name: known.get(file.name) or entry_of(file) for file in _files(staging)}
    name = export.facts.names[0]
    write_manifest(staging, Manifest(name, export.spec, written.step, None, entries))
    for path in (*staging.iterdir(), staging):
        flush(path)
    return sum(entry.size for entry in entries.values())


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
