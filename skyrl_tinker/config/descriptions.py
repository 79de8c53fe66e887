"""Settings in words, for the command line and the documentation."""

from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from skyrl_tinker.config.setting_tables import BaseOverrides
from skyrl_tinker.config.settings import Settings

SECTIONS = {
    "base_model": "Server",
    "home": "Storage",
    "device": "Trainer",
    "sampler_engine": "Samplers",
    "placement": "Trainer and samplers",
    "sdk": "Clients",
    "metrics_key": "Observation",
}
"""Titles of the sections of the settings, each by its first setting."""


def keys_of(name: str) -> dict[str, FieldInfo]:
    """Return the keys of a setting that is a table of ours, by their full names."""
    field = Settings.model_fields.get(name)
    table: Any = BaseOverrides if name == "bases" else field and field.annotation
    prefix = f"{name}.NAME" if name == "bases" else name
    return {f"{prefix}.{key}": each for key, each in getattr(table, "model_fields", {}).items()}


def takes_pairs(name: str) -> bool:
    """Return whether the command line takes a setting as NAME=VALUE."""
    field = Settings.model_fields.get(name)
    return get_origin(field and field.annotation) is dict or bool(keys_of(name))


def default_of(field: FieldInfo) -> str:
    """Return the default as a file has it, "" where the description has it."""
    if field.default in (None, (), {}) or isinstance(field.default, BaseModel | tuple):
        return ""
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)


def description_of(field: FieldInfo) -> str:
    """Return the description in one line, of a table that of its class."""
    return " ".join((field.description or field.annotation.__doc__ or "").split()).removesuffix(".")
