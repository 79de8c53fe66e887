"""Object storage of checkpoints, snapshots and weights, of which directories of this host are the cache.

A checkpoint in storage has its files under its directory's path relative to the local root, and is there when
its manifest.json is, which comes last and goes first.
"""

import asyncio
import errno
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast
from weakref import WeakValueDictionary

from skyrl_tinker.domain.manifest import FILE_NAME, entry_of, read_listing
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.errors import SkyrlTinkerError, StorageAwayError, StorageError
from skyrl_tinker.storage import owner_mark
from skyrl_tinker.storage.storage_port import LOCAL_DISK, InUse, Storage
from skyrl_tinker.system.atomic_directory import publish, staging_of, storage_errors
from skyrl_tinker.system.off_loop import in_disk_thread, in_load_thread, in_load_turn

T = TypeVar("T")
TRIES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before a call is repeated."""
FILES_AT_ONCE = 8
READ_BYTES = 4 * MiB
"""Bytes that are read ahead of a file that stays in storage."""
LEFT_S = 86_400.0
"""Age from which a directory without manifest, or without a row, is one that a dead host left."""
UNUSED_S = 3600.0
"""Time without use after which a directory of this host may go: nobody still reads it."""
KNOWN_S = 60.0
"""Time for which a directory that was found here counts as here, and as used, without another look."""
_log = logging.getLogger(__name__)


class CheckpointStorage(Storage):
    """Storage at a URL. Files outside of `root` are not its business."""

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
        self._locks: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()
        self._locking = threading.Lock()
        self._under_way: dict[Hashable, asyncio.Task[Any]] = {}
        self._known: dict[Path, float] = {}  # directories found here, until when no other look is due

    def probe(self) -> None:
        """Write, read and delete a small file. Raises StorageError when that cannot be done."""
        place = f"{self._base}/.probe-{secrets.token_hex(8)}"

        def probe() -> None:
            self._files.pipe_file(place, b"probe")
            if self._files.cat_file(place) != b"probe":
                raise OSError("the bytes read differ from the bytes written")
            self._files.rm_file(place)

        self._try("write, read and delete a file below", self._base, probe)

    def read_mark(self) -> str | None:
        """Return the mark of the database that it belongs to, None if there is none."""
        place = f"{self._base}/{owner_mark.FILE_NAME}"

        def read() -> str | None:
            return self._files.cat_file(place).decode().strip() if self._files.exists(place) else None

        return self._try("read", place, read)

    def write_mark(self, mark: str) -> None:
        """Write the mark unless there is one. Warns where the storage cannot see to that."""
        place = f"{self._base}/{owner_mark.FILE_NAME}"
        if not self._try("write", place, partial(self._create, place, mark.encode())):
            _log.warning(
                "%s: this storage has no conditional writes: of two databases whose servers first start "
                "on it at the same moment both may own it; start one after the other",
                self._url,
            )

    def _create(self, place: str, content: bytes) -> bool:
        """Write a file unless it is there; return whether the storage does so, or replaced the old file."""
        try:
            for _ in range(2):  # some ignore the condition: the second time it must be refused
                with self._files.open(place, "xb") as file:
                    file.write(content)
        except Exception as error:  # a 412 is a FileExistsError from Amazon's servers only
            if self._files.exists(place):
                return True
            lacks_mode = isinstance(error, NotImplementedError | ValueError)
            if not lacks_mode and getattr(error, "errno", None) != errno.ENOSYS:  # S3's NotImplemented
                raise
            self._files.pipe_file(place, content)
        return False

    def store(self, directory: Path) -> None:
        self._store(directory, lambda name, place: self._files.put_file(str(directory / name), place))

    def store_copy(self, directory: Path, source: Path, origin: Storage) -> None:
        if not (isinstance(origin, CheckpointStorage) and origin._is_with(self) and origin.has(source)):
            self.store(directory)
            return
        stored = origin._place(source)
        self._store(directory, lambda name, place: self._files.cp_file(f"{stored}/{name}", place))

    def _is_with(self, other: "CheckpointStorage") -> bool:
        return bool(self._files == other._files)

    def _store(self, directory: Path, write: Callable[[str, str], object]) -> None:
        """Write each file, by name and place, the manifest last."""
        place = self._place(directory)

        def put(name: str) -> None:
            self._try("write", f"{place}/{name}", lambda: write(name, f"{place}/{name}"))

        try:
            with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
                list(threads.map(put, [file.name for file in directory.iterdir() if file.name != FILE_NAME]))
            put(FILE_NAME)
        except StorageError:
            self.discard(directory)
            raise

    def fetch(self, directory: Path) -> None:
        """Check files by the manifest; those that an earlier try has fetched whole are kept."""
        if directory.is_relative_to(self._root):
            with self._lock(directory), storage_errors(f"'{directory}' could not be fetched"):
                if not self._find(directory) and self._fetch(directory):
                    self._find(directory)

    async def fetch_off_loop(self, directory: Path, share: Hashable = None) -> None:
        """Fetch it in one thread, however many wait for it, and give all its outcome. Use one event loop.

        No share waits for another one's turn, also where both want it.
        """
        fetch = partial(in_load_thread, self.fetch, directory)
        fetch_once = partial(self._once, ("fetch", directory), fetch)
        if (
            "fetch",
            directory,
        ) in self._under_way:  # its lock is held: a look would hold a disk thread as long
            await fetch_once()
            return
        look = partial(in_disk_thread, self._look, directory)
        if self._knows(directory) or await self._once(("look", directory), look):
            return
        await self._once((share, directory), partial(in_load_turn, share, fetch_once))

    async def _once(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do work that is under way for all that ask for it by this key."""
        if key not in self._under_way:
            task = self._under_way[key] = asyncio.create_task(work())
            task.add_done_callback(lambda _: self._under_way.pop(key))
            task.add_done_callback(asyncio.Task.exception)  # all that waited may be gone
        done: T = await asyncio.shield(self._under_way[key])
        return done

    def _look(self, directory: Path) -> bool:
        with self._lock(directory):
            return self._find(directory)

    def _find(self, directory: Path) -> bool:
        """Return whether it is here, and note that it is used. Call it with its lock held."""
        now, here = time.monotonic(), _touched(directory)
        for each in [each for each, until in self._known.copy().items() if until < now]:
            self._known.pop(each, None)
        if here:
            self._known[directory] = now + KNOWN_S
        return here

    def _knows(self, directory: Path) -> bool:
        return self._known.get(directory, 0.0) > time.monotonic()

    def _lock(self, directory: Path) -> threading.Lock:
        """Return the lock of a directory: a fetch waits for no other one's."""
        with self._locking:
            return self._locks.setdefault(directory, threading.Lock())

    def _fetch(self, directory: Path) -> bool:
        """Return whether the storage has it."""
        place, staging = self._place(directory), staging_of(directory)
        if not self.has(directory):
            return False
        staging.mkdir(parents=True, exist_ok=True)
        self._get(f"{place}/{FILE_NAME}", staging / FILE_NAME)
        for name, expected in read_listing(staging).items():
            file = staging / name
            if not (file.is_file() and entry_of(file) == expected):
                self._get(f"{place}/{name}", file)
                if (found := entry_of(file)) != expected:
                    file.unlink()
                    raise StorageError(
                        f"{self._name(place)}/{name} is damaged: expected {expected}, found {found}"
                    )
        publish(staging, directory)
        return True

    def open(self, directory: Path, name: str) -> BinaryIO:
        """Open a file on this host if it is here, else in storage, without a copy here."""
        if not directory.is_relative_to(self._root):
            return super().open(directory, name)
        if _touched(directory):
            with suppress(FileNotFoundError):  # evicted just now
                return super().open(directory, name)
        place = f"{self._place(directory)}/{name}"

        def opened() -> BinaryIO | None:
            with suppress(FileNotFoundError):
                return cast(BinaryIO, self._files.open(place, "rb", block_size=READ_BYTES))
            return None

        if (file := self._try("open", place, opened)) is None:
            raise FileNotFoundError(self._name(place))
        return file

    def remove(self, directory: Path) -> None:
        if not directory.is_relative_to(self._root):
            return
        self._known.pop(directory, None)
        place = self._place(directory)

        def remove() -> None:
            if self._files.exists(f"{place}/{FILE_NAME}"):
                self._files.rm_file(f"{place}/{FILE_NAME}")
            if self._files.exists(place):
                self._files.rm(place, recursive=True)

        self._try("remove", place, remove)

    def discard(self, directory: Path) -> None:
        try:
            self.remove(directory)
        except StorageError as error:
            _log.warning("files stay that nobody needs: %s", error)

    def has(self, directory: Path) -> bool:
        if not directory.is_relative_to(self._root):
            return False
        place = self._place(directory)
        return bool(self._try("look for", place, lambda: self._files.exists(f"{place}/{FILE_NAME}")))

    def listed(self, pattern: str, below: Path | None = None) -> Sequence[Path]:
        try:
            return list(self._stored(pattern, below or self._root))
        except StorageAwayError as error:
            _log.warning("files may stay that nobody needs: %s", error)
            return ()

    def discard_old(self, pattern: str, unneeded: Collection[Path]) -> None:
        for directory, files in self._stored(pattern, self._root).items():
            if FILE_NAME in files and directory not in unneeded:
                continue
            place = self._place(directory)
            written = [
                self._try("look at", place, partial(self._written_at, f"{place}/{name}")) for name in files
            ]
            if time.time() - max(written) > LEFT_S:
                self.discard(directory)

    def _written_at(self, place: str) -> float:
        return float(self._files.modified(place).timestamp())

    def evict(self, limit: float, in_use: InUse) -> None:
        found = [file.parent for file in self._root.glob(f"**/{FILE_NAME}") if file.parent.name[0] != "."]
        sizes = {directory: sum(file.stat().st_size for file in directory.iterdir()) for directory in found}
        excess = sum(sizes.values()) - limit
        for directory in sorted(found, key=_used_at):
            if excess <= 0 or not _unused(directory):
                return
            if self.has(directory) and self._evict(directory, in_use):
                excess -= sizes[directory]

    def _evict(self, directory: Path, in_use: InUse) -> bool:
        """Delete it here, unless it is in use, or a fetch has found it meanwhile; returns whether it did."""
        doomed = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
        with self._lock(directory):
            if not _unused(directory) or in_use(str(directory)):
                return False
            self._known.pop(directory, None)
            directory.rename(doomed)  # in one step, and not where a fetch of it makes it anew
        shutil.rmtree(doomed, ignore_errors=True)
        return True

    def _stored(self, pattern: str, below: Path) -> dict[Path, list[str]]:
        """Return files by directory; of others that somebody keeps there this is not the owner."""
        place, depth = self._place(below), pattern.count("/") + 2
        found: dict[Path, list[str]] = {}
        for path in self._try("list", place, lambda: self._files.find(place)):
            file = PurePosixPath(path[path.index(self._base) + len(self._base) + 1 :])
            if len(file.parts) == depth and file.parent.match(pattern):
                found.setdefault(self._root / file.parent, []).append(file.name)
        return found

    def _get(self, place: str, target: Path) -> None:
        self._try("read", place, lambda: self._files.get_file(place, str(target)))

    def _place(self, directory: Path) -> str:
        return f"{self._base}/{directory.relative_to(self._root)}".removesuffix("/.")

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
                    kind = StorageError if isinstance(error, FileNotFoundError) else StorageAwayError
                    raise kind(f"cannot {action} {self._name(place)}: {cause}") from error
                _log.warning("%s %s: %s; tried again in %g s", action, self._name(place), error, pause)
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")


def open_storage(
    root: Path, url: str | None, part: str = "", pauses_s: tuple[float, ...] = TRIES_S
) -> Storage:
    """`part`: a path below the URL."""
    return LOCAL_DISK if url is None else CheckpointStorage(root, f"{url.rstrip('/')}/{part}", pauses_s)


def _unused(directory: Path) -> bool:
    return time.time() - _used_at(directory) >= UNUSED_S + KNOWN_S


def _used_at(directory: Path) -> float:
    return directory.stat().st_mtime


def _touched(directory: Path) -> bool:
    """Note that a directory is used, if it is there."""
    with suppress(FileNotFoundError):
        os.utime(directory)
        return True
    return False
