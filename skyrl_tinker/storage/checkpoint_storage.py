"""Object storage of checkpoints. Directories of this host are written first, and then serve as its cache.

A checkpoint in storage has its files under its directory's path relative to the local root, and is there when
its manifest.json is, which comes last and goes first.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from skyrl_tinker.atomic_directory import publish, staging_of
from skyrl_tinker.domain.manifest import FILE_NAME, entry_of, read_manifest
from skyrl_tinker.errors import SkyrlTinkerError, StorageError

T = TypeVar("T")
TRIES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before a call is repeated."""
FILES_AT_ONCE = 8
_log = logging.getLogger(__name__)


class Storage(Protocol):
    """Place of checkpoints beside their directories on this host. See CheckpointStorage."""

    def store(self, directory: Path) -> None: ...
    def fetch(self, directory: Path) -> None: ...
    def remove(self, directory: Path) -> None: ...
    def discard(self, directory: Path) -> None: ...


class LocalDisk:
    """Storage of a server whose checkpoints are on this host's disk only."""

    def store(self, directory: Path) -> None:
        """Do nothing: it is where it stays."""

    def fetch(self, directory: Path) -> None:
        """Do nothing: it is there, or gone."""

    def remove(self, directory: Path) -> None:
        """Do nothing: who removes the directory removes it."""

    def discard(self, directory: Path) -> None:
        """Do nothing, as `remove`."""


LOCAL_DISK = LocalDisk()


class CheckpointStorage:
    """Storage at a URL. Every call may take as long as the network does: make it in a thread.

    StorageError names the URL and the cause. What lies outside of `root` is not its business.
    """

    def __init__(self, root: Path, url: str, pauses_s: tuple[float, ...] = TRIES_S) -> None:
        """`root`: of the local directories. ValueError, ImportError: fsspec does not know the URL."""
        import fsspec  # type: ignore[import-untyped]  # not installed everywhere

        self._root = root
        self._url = url.rstrip("/")
        self._pauses_s = pauses_s
        options = {"skip_instance_cache": True, "use_listings_cache": False}
        self._files, self._base = fsspec.core.url_to_fs(self._url, **options)
        if hasattr(self._files, "auto_mkdir"):  # a file system that has directories
            self._files.auto_mkdir = True
        self._fetching = threading.Lock()

    def probe(self) -> None:
        """Write, read and delete a small file. Raises StorageError when that cannot be done."""
        place = f"{self._base}/.probe-{secrets.token_hex(8)}"

        def probe() -> None:
            self._files.pipe_file(place, b"probe")
            if self._files.cat_file(place) != b"probe":
                raise OSError("what was written is not what is read")
            self._files.rm_file(place)

        self._try("write, read and delete a file", self._url, probe)

    def store(self, directory: Path) -> None:
        """Store a directory with a manifest; nothing of it stays there after StorageError."""
        names = [file.name for file in directory.iterdir() if file.name != FILE_NAME]
        place = self._place(directory)
        try:
            with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
                list(threads.map(lambda name: self._put(directory / name, f"{place}/{name}"), names))
            self._put(directory / FILE_NAME, f"{place}/{FILE_NAME}")
        except StorageError:
            self.discard(directory)
            raise

    def fetch(self, directory: Path) -> None:
        """Make the local directory, unless it is there.

        Files are checked by the manifest; those that an earlier try has fetched whole are kept. Harmless when
        the storage has none, too: then there is no directory.
        """
        if directory.exists() or not directory.is_relative_to(self._root):
            return
        with self._fetching:
            if directory.exists():  # another thread has fetched it
                return
            place, staging = self._place(directory), staging_of(directory)
            if not self._try("look for", place, lambda: self._files.exists(f"{place}/{FILE_NAME}")):
                return
            staging.mkdir(parents=True, exist_ok=True)
            self._get(f"{place}/{FILE_NAME}", staging / FILE_NAME)
            for name, expected in read_manifest(staging).files.items():
                file = staging / name
                if not (file.is_file() and entry_of(file) == expected):
                    self._get(f"{place}/{name}", file)
                    if (found := entry_of(file)) != expected:
                        file.unlink()
                        raise StorageError(
                            f"{self._name(place)}/{name} is damaged: expected {expected}, found {found}"
                        )
            publish(staging, directory)

    def remove(self, directory: Path) -> None:
        """Remove it from storage; harmless if it is not there."""
        place = self._place(directory)

        def remove() -> None:
            if self._files.exists(f"{place}/{FILE_NAME}"):
                self._files.rm_file(f"{place}/{FILE_NAME}")
            if self._files.exists(place):
                self._files.rm(place, recursive=True)

        self._try("remove", place, remove)

    def discard(self, directory: Path) -> None:
        """Remove what a failed save has stored, if that can be done."""
        try:
            self.remove(directory)
        except StorageError as error:
            _log.warning("files of a failed save stay: %s", error)

    def _put(self, source: Path, place: str) -> None:
        self._try("write", place, lambda: self._files.put_file(str(source), place))

    def _get(self, place: str, target: Path) -> None:
        self._try("read", place, lambda: self._files.get_file(place, str(target)))

    def _place(self, directory: Path) -> str:
        return f"{self._base}/{directory.relative_to(self._root)}"

    def _name(self, place: str) -> str:
        return self._url + place.removeprefix(self._base)

    def _try(self, action: str, place: str, call: Callable[[], T]) -> T:
        """Make the call, again after each pause. Raises StorageError."""
        for pause in (*self._pauses_s, None):
            try:
                return call()
            except SkyrlTinkerError:
                raise
            except Exception as error:  # each file system has its own
                if pause is None or isinstance(error, PermissionError | FileNotFoundError):
                    cause = str(error) or type(error).__name__
                    raise StorageError(f"cannot {action} {self._name(place)}: {cause}") from error
                _log.warning("%s %s: %s; tried again in %g s", action, self._name(place), error, pause)
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")


def open_storage(root: Path, url: str | None) -> "Storage":
    return LOCAL_DISK if url is None else CheckpointStorage(root, url)
