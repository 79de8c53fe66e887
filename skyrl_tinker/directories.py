"""Every path of a server."""

import shutil
from pathlib import Path

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.errors import StartupError
from skyrl_tinker.system.user_directory import close_to_others, make_private, user_directory

LOG_BYTES = 64 * MiB
"""Largest size of a log file; two older ones are kept of each."""
_SHM = Path("/dev/shm")
_HOME = "home"  # a note in ephemeral_dir: the home that it belongs to


class Directories:
    """Paths of one server. `make` creates them; nothing else does."""

    def __init__(self, settings: Settings) -> None:
        self.home = settings.root
        self.checkpoint_root = settings.checkpoint_root
        self.run_dir = self.home / "run"
        self.log_dir = self.home / "logs"
        self.models_dir = self.home / "models"
        self.snapshot_dir, self.overflow_dir = self.home / "snapshots", self.home / "run" / "overflow"
        if settings.snapshots is not None and settings.snapshot_url is None:
            shared = Path(settings.snapshots).absolute()
            self.snapshot_dir, self.overflow_dir = shared / "models", shared / "unnamed"
        self.settings_file = self.run_dir / "settings.json"
        self.server_lock = self.run_dir / "serve.lock"
        self.engine_lock = self.run_dir / "engine.lock"
        self.pid_file = self.run_dir / "processes.json"
        self.bell_dir = user_directory(Path("/tmp"), self.home)
        self.engine_socket = self.bell_dir / "engine.http"
        self.metrics_dir = self.bell_dir / "metrics"
        self.ephemeral_dir = user_directory(_SHM, self.home) if _SHM.is_dir() else self.run_dir / "adapters"

    def make(self) -> None:
        """Create every directory, closed to other users. Raises StartupError when one cannot be ours alone.

        The permissions of a directory that lies elsewhere, and is there, are not ours to change.
        """
        for directory in (self.home, self.run_dir, self.log_dir, self.models_dir):
            _make(directory)
            close_to_others(directory)
        for directory, setting in ((self.checkpoint_root, "checkpoints"), (self.snapshot_dir, "snapshots")):
            existed = directory.exists()
            _make(directory, "home" if directory.is_relative_to(self.home) else setting)
            if directory.is_relative_to(self.home) or not existed:
                close_to_others(directory)
        for directory in (self.bell_dir, self.ephemeral_dir):
            if directory.parent.name.startswith("skyrl-tinker-"):
                make_private(directory.parent)
            make_private(directory)
        (self.ephemeral_dir / _HOME).write_text(str(self.home))

    def listening_note(self, pid: int) -> Path:
        """Return the file that an API process of this id writes once it accepts connections."""
        return self.bell_dir / f"api-{pid}.listens"

    def delete_temporary(self) -> None:
        """Delete sockets and temporary files of processes that have ended."""
        shutil.rmtree(self.bell_dir, ignore_errors=True)

    def delete_outside_home(self) -> None:
        """Delete all that lies outside the home; for a home that is itself deleted."""
        self.delete_temporary()
        shutil.rmtree(self.ephemeral_dir, ignore_errors=True)

    def delete_orphaned(self) -> None:
        """Delete files that servers left outside homes that have since been deleted."""
        for note in self.ephemeral_dir.parent.glob(f"*/{_HOME}"):
            if not _home_in(note).exists():
                shutil.rmtree(self.bell_dir.parent / note.parent.name, ignore_errors=True)
                shutil.rmtree(note.parent, ignore_errors=True)


def free_bytes(directory: Path) -> int:
    """Return the free bytes of the disk of a directory, which need not exist yet."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(there).free


def _home_in(note: Path) -> Path:
    """Return the home that a note names, or the note itself, which is gone, if another server deleted it."""
    try:
        return Path(note.read_text())
    except FileNotFoundError:
        return note


def _make(directory: Path, setting: str = "home") -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(
            f"cannot create {directory}: {error.strerror}; choose another directory with --{setting}"
        ) from error
