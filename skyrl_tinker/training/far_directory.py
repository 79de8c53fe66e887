"""Directories of the engine's host, and their copies on hosts that do not share them."""

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from skyrl_tinker.errors import SkyrlTinkerError, StorageAwayError, StorageError, TrainerError
from skyrl_tinker.system.atomic_directory import storage_errors
from skyrl_tinker.training.actors import Actors

BLOCK_BYTES = 64 << 20
_log = logging.getLogger(__name__)


async def look_for_shared(ranks: Actors, directories: Sequence[Path]) -> None:
    """Have ranks of other hosts record those directories that they do not share. Raises TrainerError."""
    if not ranks.spread:
        return
    name = f".shared-{secrets.token_hex(16)}"
    marks = [directory / name for directory in directories]
    await asyncio.to_thread(_touch_all, marks)
    try:
        unshared = await ranks.look_for({str(directory): name for directory in directories})
    except StorageError as error:
        raise TrainerError(str(error)) from error
    finally:
        await asyncio.to_thread(_remove_all, marks)
    for directory in sorted(unshared):
        _log.info("%s is not shared: ranks of other hosts send and get its files", directory)


def _touch_all(files: Iterable[Path]) -> None:
    for file in files:
        with suppress(OSError):  # a full disk: it then counts as not shared, and works as well
            file.touch()


def _remove_all(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


class FarDirectory:
    """Copying between this host and others, through one rank of each, while the ranks do other work."""

    def __init__(self, ranks: Actors, directory: str) -> None:
        self._ranks = ranks
        self._directory = Path(directory)
        self._apart = ranks.apart(directory)

    async def bring(self) -> None:
        """Copy the other hosts' files here. Raises StorageError, TrainerError."""
        for rank in self._apart:
            sizes: dict[str, int] = await self._ranks.file_call(rank, "sizes", str(self._directory))
            for name, size in sizes.items():
                await self._bring_file(rank, self._directory / name, size)

    async def carry(self) -> None:
        """Copy the directory to the other hosts, if it exists.

        Raises StorageError when it cannot be read, StorageAwayError when another host cannot store it now,
        TrainerError when a rank has died.
        """
        if self._apart:
            with storage_errors(f"'{self._directory}' cannot be read"):
                for path in await asyncio.to_thread(_files, self._directory):
                    await self._carry_file(path)

    async def drop(self) -> None:
        """Remove the other hosts' copies. Skip hosts whose rank has died."""
        for rank in self._apart:
            with suppress(SkyrlTinkerError):
                await self._ranks.file_call(rank, "remove", str(self._directory))

    async def _bring_file(self, rank: int, path: Path, size: int) -> None:
        with storage_errors(f"a file of rank {rank} could not be written here"), path.open("wb") as file:
            for offset in range(0, size, BLOCK_BYTES):
                block = await self._ranks.file_call(rank, "read", str(path), offset, BLOCK_BYTES)
                await asyncio.to_thread(file.write, block)

    async def _carry_file(self, path: Path) -> None:
        with path.open("rb") as file:
            offset = 0
            while (block := await asyncio.to_thread(file.read, BLOCK_BYTES)) or not offset:
                sent = await asyncio.to_thread(ray.put, block)  # once for all hosts
                await asyncio.gather(*(self._write(rank, path, offset, sent) for rank in self._apart))
                offset += max(1, len(block))

    async def _write(self, rank: int, path: Path, offset: int, block: Any) -> None:
        try:
            await self._ranks.file_call(rank, "write", str(path), offset, block)
        except TrainerError:
            raise
        except SkyrlTinkerError as error:  # its disk may be full
            raise StorageAwayError(f"{self._directory} cannot be copied to another host: {error}") from error


def _files(directory: Path) -> list[Path]:
    """Return the files, none for a missing directory, which its reader reports."""
    return sorted(directory.iterdir()) if directory.is_dir() else []
