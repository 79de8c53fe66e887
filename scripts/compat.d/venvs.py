"""A venv for each SDK version, with the newest of everything that the version asks for."""

import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VERSIONS = (
    "0.38.0",
    "0.36.0",
    "0.33.1",
    "0.28.1",
    "0.25.0",
    "0.24.1",
    "0.22.0",
    "0.18.2",
    "0.15.0",
    "0.8.1",
    "0.3.0",
)
"""The newest first: what it leaves behind (external checkpoints) the older ones have to bear."""
_NEED_TORCH = ("0.3.0",)


def interpreter(number: str, root: Path) -> Path:
    """Return a Python that has this SDK: this one if it does, else one in a venv below `root`.

    CalledProcessError when pip cannot install it.
    """
    if _here("tinker") == number:
        return Path(sys.executable)
    home = root / number
    ready = home / "ready"
    if not ready.exists():
        _make(number, home)
        ready.touch()
    return home / "bin" / "python"


def _make(number: str, home: Path) -> None:
    venv.create(home, clear=True, symlinks=True)
    if number in _NEED_TORCH:
        # The build that is here: what an index offers first may be gigabytes of CUDA.
        _install(home, f"torch=={_here('torch')}")
    _install(home, f"tinker=={number}")


def _install(home: Path, requirement: str) -> None:
    """With the pip of this interpreter, which saves each venv its own; bytecode is made when it is needed."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(home / "bin" / "python"),
    ]
    subprocess.run([*pip, "install", "-qq", "--no-compile", requirement], check=True)


def _here(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
