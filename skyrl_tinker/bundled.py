"""Folders that lie at the root of a checkout and inside the package in a wheel: `alembic`, `examples`."""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def bundled(name: str) -> Path:
    """Return the directory; pyproject.toml names its copy in the wheel."""
    inside = _PACKAGE / "bundled_files" / name
    return inside if inside.exists() else _PACKAGE.parent / name
