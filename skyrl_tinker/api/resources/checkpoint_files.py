"""Files of a checkpoint to be read by clients, on this host or in storage."""

import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import anyio
from anyio import AsyncFile
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from skyrl_tinker.domain.manifest import FILE_NAME, Manifest, parse_manifest
from skyrl_tinker.errors import NotFoundError, found
from skyrl_tinker.storage.storage_port import Storage
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.system.off_loop import in_transfer_thread

BINARY = "application/octet-stream"


class CheckpointFiles:
    """Files of one checkpoint. NotFoundError: it was just removed."""

    def __init__(self, storage: Storage, row: CheckpointRow) -> None:
        self._storage = storage
        self._row = row

    async def manifest(self) -> Manifest:
        text = await self.read(FILE_NAME)
        return parse_manifest(text, f"{FILE_NAME} of {self._row.path}")

    async def read(self, name: str) -> bytes:
        """Read a small file."""
        with await self.open(name) as file:
            return await in_transfer_thread(file.read)

    async def open(self, name: str) -> BinaryIO:
        try:
            return await in_transfer_thread(self._storage.open, Path(self._row.directory), name)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"no checkpoint {self._row.path}: its files are gone") from None

    async def response(self, name: str) -> "StoredFileResponse":
        """Answer with a file of the manifest. NotFoundError for an unknown name, too."""
        files = (await self.manifest()).files
        entry = found(files.get(name), f"{self._row.path} has no file {name!r}")
        return StoredFileResponse(await self.open(name), name, entry.size, self._row.created_at)


class StoredFileResponse(FileResponse):
    """Response with ranges and HEAD by Starlette, from an open file: the cache may go meanwhile."""

    chunk_size = 1 << 20  # each chunk is read in another thread

    def __init__(self, file: BinaryIO, name: str, size: int, written_at: float) -> None:
        """`size`, `written_at`: for headers, the same from any host."""
        status = os.stat_result((stat.S_IFREG, 0, 0, 0, 0, 0, size, 0, int(written_at), 0))
        super().__init__(name, media_type=BINARY, filename=name, stat_result=status)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)

    @asynccontextmanager
    async def _open_file(self) -> AsyncIterator[AsyncFile[bytes]]:
        yield anyio.wrap_file(self._file)
