"""Parts of a checkout beside the package: folders, which a wheel has inside it, and how to install more."""

from pathlib import Path

_PACKAGE = Path(__file__).parent
_KINDS = "cpu", "gpu"


def bundled(name: str) -> Path:
    """Return the directory; pyproject.toml names its copy in the wheel."""
    inside = _PACKAGE / "bundled_files" / name
    return inside if inside.exists() else _PACKAGE.parent / name


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra: in a checkout the locked ones."""
    setup = _PACKAGE.parent / "scripts" / "setup"
    if not setup.exists():
        return f"pip install 'skyrl-tinker[{extra}]'"
    return f"{setup} {extra}" if extra in _KINDS else str(setup)  # which brings the other extras
