"""A directory of the engine's host, and what hosts have of it that do not share it."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyrl_tinker.atomic_directory import storage_errors
from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.training.actors import Actors, Writer

BLOCK_BYTES = 64 << 20


class FarDirectory:
    """Copies between this host and others, through one rank of each, beside what the ranks compute."""

    def __init__(self, ranks: Actors, writer: Writer, directory: str) -> None:
        """`writer`: the thread of the ranks that reads and writes."""
        self._ranks = ranks
        self._writer: Writer = writer
        self._directory = Path(directory)
        self._apart = ranks.apart(directory)

    async def bring(self) -> None:
        """Copy here what other hosts have of it. Raises StorageError, TrainerError."""
        for rank in self._apart:
            sizes: dict[str, int] = await self._call(rank, "sizes", str(self._directory))
            for name, size in sizes.items():
                await self._bring_file(rank, self._directory / name, size)

    async def carry(self) -> None:
        """Copy it to other hosts, if it is there. Raises StorageError, TrainerError."""
        if self._apart:
            for path in await asyncio.to_thread(_files, self._directory):
                await self._carry_file(path)

    async def drop(self) -> None:
        """Remove it from other hosts; what those hold that died is theirs no more."""
        for rank in self._apart:
            with suppress(SkyrlTinkerError):
                await self._call(rank, "remove", str(self._directory))

    async def _bring_file(self, rank: int, path: Path, size: int) -> None:
        with storage_errors(f"a file of rank {rank} could not be written here"), path.open("wb") as file:
            for offset in range(0, size, BLOCK_BYTES):
                block = await self._call(rank, "read", str(path), offset, BLOCK_BYTES)
                await asyncio.to_thread(file.write, block)

    async def _carry_file(self, path: Path) -> None:
        with storage_errors(f"{path} cannot be read"), path.open("rb") as file:
            offset = 0
            while (block := await asyncio.to_thread(file.read, BLOCK_BYTES)) or not offset:
                await asyncio.gather(
                    *(self._call(rank, "write", str(path), offset, block) for rank in self._apart)
                )
                offset += max(1, len(block))

    async def _call(self, rank: int, method: str, *args: Any) -> Any:
        return await self._ranks.file_call(rank, self._writer, method, *args)


def _files(directory: Path) -> list[Path]:
    """Return none of a directory that is not there: who reads it says so."""
    return sorted(directory.iterdir()) if directory.is_dir() else []
