"""Functions of vLLM that the plugin replaces or repeats, by the digests of their source in known releases."""

import hashlib
import inspect
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

SUPPORTED = ("0.32.", "0.33.")
LISTED = Path(__file__).with_name("vllm_targets.json")
"""Digests by target and release; `scripts/vllm-targets` writes it."""


def digest(root: Path, target: str) -> str | None:
    """Return the SHA-256 of a target's source, read without an import; None if it does not exist.

    `root`: directory of vLLM's package. `target`: module and qualified name, as "v1.outputs:Class.name".
    """
    module, _, qualified = target.partition(":")
    file = root.joinpath(*module.split(".")).with_suffix(".py")
    if not file.exists():
        return None
    lines = file.read_text().splitlines(keepends=True)
    *owner, name = qualified.split(".")
    for each in owner:
        if (start := _start(lines, rf"class {each}\b")) is None:
            return None
        rest = lines[start + 1 :]
        lines = rest[: _start(rest, r"(async def|def|class) ")]
    indent = r"\s+" if owner else ""
    if (start := _start(lines, rf"{indent}(async def|def|class) {name}\b")) is None:
        return None
    return hashlib.sha256("".join(inspect.getblock(lines[start:])).encode()).hexdigest()


def unknown(root: Path, targets: Iterable[str]) -> list[str]:
    """List the targets whose source is that of no release in the table."""
    table = _table(LISTED)
    return [target for target in targets if digest(root, target) not in table.get(target, {}).values()]


def releases() -> list[str]:
    """List the releases of the table."""
    return sorted({release for digests in _table(LISTED).values() for release in digests})


@cache
def _table(file: Path) -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = json.loads(file.read_text())
    return table


def _start(lines: list[str], pattern: str) -> int | None:
    return next((number for number, line in enumerate(lines) if re.match(pattern, line)), None)
