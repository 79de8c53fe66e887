"""`skyrl-tinker serve --show-config`: the settings as a file that --config takes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import BaseModel
from tomlkit.items import Item

from skyrl_tinker.config import Settings


def as_toml(settings: Settings) -> str:
    """Return a line for each setting; those that were not given are comments."""
    return "\n".join(("# Commented lines are defaults.", *_lines(settings)))


def _lines(settings: BaseModel, table: str = "") -> Iterator[str]:
    for name, value in settings:
        full, given = table + name, "" if name in settings.model_fields_set else "# "
        if isinstance(value, BaseModel):
            yield from _lines(value, f"{full}.")
        else:
            yield (
                f"{given}{full} = {_item(value).as_string()}" if value is not None else f"# {full} is not set"
            )


def _item(value: Any) -> Item:
    """Return the value in TOML, on one line, and of a table the keys that were given."""
    if isinstance(value, BaseModel):
        return _item(value.model_dump(exclude_unset=True))
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        for name, each in value.items():
            table.append(name, _item(each))
        return table
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(map(_item, value))
        return array
    return tomlkit.item(str(value) if isinstance(value, Path) else value)
