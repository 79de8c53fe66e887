"""Sources of the settings.

Strongest first, for each key of a table: arguments, SKYRL_TINKER_…, --config FILE.toml.
"""

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict, SettingsError

from skyrl_tinker.config.descriptions import keys_of, takes_pairs
from skyrl_tinker.config.settings import Settings
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.base import describe

_SETUP_ONLY = frozenset({"torch_index"})  # SKYRL_TINKER_… variables that only scripts/setup reads


def load(config: Path | None = None, **overrides: Any) -> Settings:
    """Parse the settings. Overrides that are None count as not given; model_fields_set names the given ones.

    A table may be given as texts NAME=VALUE. Raises pydantic.ValidationError that names the unknown key or
    the bad value, and UserError for a file that is no TOML, or a variable that is no JSON where it has to be.
    """
    overridden: dict[str, Any] = _unknown_variables() | {
        name: _read_pairs(name, value) if takes_pairs(name) and isinstance(value, list | tuple) else value
        for name, value in overrides.items()
        if value is not None
    }

    class _FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=config)

    try:
        read = _FromFile(**overridden)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"--config: not a TOML file: {error}") from error
    except SettingsError as error:
        raise _no_json(error) from error
    return Settings.model_validate(read.model_dump(exclude_unset=True))


def read_back(file: Path) -> Settings:
    """Read all settings, as `serve` writes them for its processes. Raises OSError, and UserError."""
    try:
        found = Settings.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UserError(f"{file}: {describe(error.errors(include_url=False))}") from error
    if missing := Settings.model_fields.keys() - found.model_fields_set:
        raise UserError(f"{file}: {min(missing)} is missing, expected every setting of a server")
    return found


def _no_json(error: SettingsError) -> UserError:
    """Name the variable of pydantic_settings' words: error parsing value for field "NAME" from source …."""
    name = str(error).split('"')[1].upper()
    variable = f"{Settings.model_config['env_prefix']}{name}"
    return UserError(f'environment variable {variable}: expected JSON, as ["a", "b"] or {{"a": 1}}')


def _read_pairs(name: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Read texts NAME=VALUE, of which a name alone is true. Arguments of samplers are JSON if they can be.

    Those of `bases` are names, with uses behind them or without. Raises UserError for unknown uses.
    """
    if name == "bases":
        return dict(map(_read_base, pairs))
    split = (pair.partition("=") for pair in pairs)
    texts = {key: value if equals else "true" for key, equals, value in split}
    return texts if keys_of(name) else {key: _json_or_text(value) for key, value in texts.items()}


def _read_base(text: str) -> tuple[str, dict[str, Any]]:
    """Read NAME or NAME:USES, which are roles, and on_demand. A directory's name may contain colons."""
    name, _, behind = text.rpartition(":")
    if not name or "/" in behind or Path(text).exists():
        return text, {"roles": ["sample"]}
    uses, known = behind.split(","), ("train", "sample", "on_demand")
    if unknown := [each for each in uses if each not in known]:
        expected = "expected train, sample or on_demand, with commas between them"
        raise UserError(f"--also {text}: found {unknown[0]!r} behind the name, {expected}")
    roles = [each for each in uses if each != "on_demand"] or ["sample"]
    return name, {"roles": roles} | ({"start": "on_demand"} if "on_demand" in uses else {})


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def variables() -> dict[str, str]:
    """Return the variables of the environment with our prefix, by the names of their settings."""
    prefix = Settings.model_config["env_prefix"]
    return {name.removeprefix(prefix).lower(): name for name in os.environ if name.startswith(prefix)}


def _unknown_variables() -> dict[str, str]:
    """Return variables with our prefix that are no settings, to be refused like other unknown keys."""
    return {
        key: os.environ[name]
        for key, name in variables().items()
        if key not in {*Settings.model_fields, *_SETUP_ONLY}
    }
