"""Folders that lie at the root of a checkout and inside the package in a wheel: `alembic`, `examples`."""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def bundled(name: str) -> Path:
    """Return the directory; pyproject.toml says under which name the wheel takes it in."""
    inside = _PACKAGE / "bundled_files" / name
    return inside if inside.exists() else _PACKAGE.parent / name
