"""Every path of a server."""

import hashlib
import os
import shutil
from pathlib import Path

from skyrl_tinker.config import Settings
from skyrl_tinker.errors import StartupError

_SHM = Path("/dev/shm")
_HOME = "home"  # a note in ephemeral_dir: the home that it belongs to


def home_digest(home: Path) -> str:
    """Return 10 hex digits that name a home in shared directories, where paths must be short."""
    return hashlib.sha256(str(home.absolute()).encode()).hexdigest()[:10]


class Directories:
    """Paths of one server. `make` creates them; nothing else does."""

    def __init__(self, settings: Settings) -> None:
        self.home = settings.root
        self.checkpoint_root = settings.checkpoint_root
        self.run_dir = self.home / "run"
        self.log_dir = self.home / "logs"
        self.models_dir = self.home / "models"
        self.settings_file = self.run_dir / "settings.json"
        self.lock_file = self.run_dir / "serve.lock"
        self.pid_file = self.run_dir / "processes.json"
        self.bell_dir = _private_name(Path("/tmp")) / home_digest(self.home)
        self.engine_socket = self.bell_dir / "engine.http"
        self.ephemeral_dir = (
            _private_name(_SHM) / home_digest(self.home) if _SHM.is_dir() else self.run_dir / "adapters"
        )

    def make(self) -> None:
        """Create every directory. Raises StartupError when one cannot be ours alone."""
        for directory in (self.home, self.run_dir, self.log_dir, self.models_dir, self.checkpoint_root):
            _make(directory)
        for directory in (self.bell_dir, self.ephemeral_dir):
            if directory.parent.name.startswith("skyrl-tinker-"):
                _make_private(directory.parent)
            _make_private(directory)
        (self.ephemeral_dir / _HOME).write_text(str(self.home))

    def delete_temporary(self) -> None:
        """Delete sockets and temporary files of processes that have ended."""
        shutil.rmtree(self.bell_dir, ignore_errors=True)

    def delete_outside_home(self) -> None:
        """Delete all that lies outside the home; for a home that is itself deleted."""
        self.delete_temporary()
        shutil.rmtree(self.ephemeral_dir, ignore_errors=True)

    def delete_orphaned(self) -> None:
        """Delete what servers left outside homes that have since been deleted."""
        for note in self.ephemeral_dir.parent.glob(f"*/{_HOME}"):
            if not _home_in(note).exists():
                shutil.rmtree(self.bell_dir.parent / note.parent.name, ignore_errors=True)
                shutil.rmtree(note.parent, ignore_errors=True)


def _home_in(note: Path) -> Path:
    """Return the home that a note names, or the note itself, which is gone, if another server deleted it."""
    try:
        return Path(note.read_text())
    except FileNotFoundError:
        return note


def _private_name(shared: Path) -> Path:
    return shared / f"skyrl-tinker-{os.getuid()}"


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(
            f"cannot create {directory}: {error.strerror}; choose another directory with --home"
        ) from error


def _make_private(directory: Path) -> None:
    """Create a directory in one that others can write to. Refuse another user's directory, or a link."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or directory.is_symlink():
        raise StartupError(f"{directory} belongs to another user; remove it and start again")
    directory.chmod(0o700)
