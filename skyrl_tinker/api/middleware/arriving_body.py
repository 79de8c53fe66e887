"""Bodies while they arrive: in memory up to a limit that all share, beyond it in files, at a least pace."""

import asyncio
import io
import tempfile
from collections import Counter
from pathlib import Path
from typing import IO

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.errors import NoRoomError, OverloadedError, TooSlowError

GRACE_S = 30.0
STRIDE, STRIDE_S = MiB, 10.0
"""Pace after the first GRACE_S: each STRIDE bytes within STRIDE_S of the ones before."""
MEMORY = 16 * MiB
"""Memory for all bodies that arrive; a body that finds too little goes to a file."""
UNCOUNTED = 16 * 1024
"""First bytes of each body: most requests are no larger."""
OWNER_FILES = 2048 * MiB
"""Largest total of one owner's files."""
LARGE_BYTES = 256 * 1024
"""Whole bodies up to this size need no budget and no turns: heartbeats and samples overtake larger ones."""
WHOLE = "skyrl_tinker.whole"
"""Extension in the scope of a request whose body has come, so that receiving it waits for no client."""
PARTS_AT_ONCE = 8
"""Parts of bodies over LARGE_BYTES that are taken in one round of the event loop."""
_RETRY_S = 10


class Spool:
    """Memory and files for the arrived parts of all bodies."""

    def __init__(self, directory: Path) -> None:
        """`directory`: for unnamed files; it need not exist before the first."""
        self._directory = directory
        self._memory_left = MEMORY
        self._rounds = asyncio.Semaphore(PARTS_AT_ONCE)
        self._files: Counter[OwnerId | None] = Counter()  # bytes

    async def take_turn(self, size: int) -> None:
        """Wait until the next part may be taken of a body that has so many bytes.

        Uvicorn reads on only once a part was taken. So hundreds of clients that send large bodies at once
        leave the loop to others after a few parts.
        """
        if size > LARGE_BYTES:
            async with self._rounds:
                await asyncio.sleep(0)

    def take_memory(self, size: int) -> bool:
        """Take memory if there is so much."""
        if size > self._memory_left:
            return False
        self._memory_left -= size
        return True

    def return_memory(self, size: int) -> None:
        self._memory_left += size

    def open_file(self) -> IO[bytes]:
        self._directory.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=self._directory)

    def take_file(self, owner: OwnerId | None, size: int) -> None:
        """Count bytes of a file. OverloadedError when the owner has too many."""
        if self._files[owner] + size > OWNER_FILES:
            raise OverloadedError(
                f"request body: {self._files[owner] // MiB} MiB of this owner's bodies arrive at once, "
                f"expected at most {OWNER_FILES // MiB}",
                _RETRY_S,
            )
        self._files[owner] += size

    def return_file(self, owner: OwnerId | None, size: int) -> None:
        self._files[owner] -= size
        if not self._files[owner]:
            del self._files[owner]


class ArrivingBody:
    """Received part of a body, whose memory and file are given back at the end of its context.

    `size`: its bytes. `more`: the client has not sent the rest yet.
    """

    def __init__(self, receive: Receive, spool: Spool, owner: OwnerId | None) -> None:
        self._receive = receive
        self._spool = spool
        self._owner = owner
        self._memory = io.BytesIO()
        self._file: IO[bytes] | None = None
        self._memory_taken = 0
        self._file_taken = 0
        self.size = 0
        self.more = True

    def __enter__(self) -> "ArrivingBody":
        return self

    def __exit__(self, *_: object) -> None:
        self._spool.return_memory(self._memory_taken)
        if self._file is not None:
            self._spool.return_file(self._owner, self._file_taken)
            self._file.close()

    async def read(self, most: int) -> None:
        """Receive until the body ends or has more than `most` bytes.

        Raises TooSlowError, ClientDisconnect, and OverloadedError when there is no room for it.
        """
        loop = asyncio.get_running_loop()
        next_stride = STRIDE
        try:
            async with asyncio.timeout(GRACE_S) as deadline:
                while self.more and self.size <= most:
                    await self._spool.take_turn(self.size)
                    await self._receive_part()
                    if self.size >= next_stride:
                        next_stride = self.size + STRIDE
                        deadline.reschedule(max(deadline.when() or 0.0, loop.time() + STRIDE_S))
        except TimeoutError:
            raise TooSlowError(
                f"request body: found {self.size} bytes and then too little, expected all within "
                f"{GRACE_S:.0f} s, or {STRIDE // MiB} MiB every {STRIDE_S:.0f} s"
            ) from None

    async def first_bytes(self, size: int) -> bytes:
        """Return at most `size` bytes of the arrived part."""
        if self._file is None:
            return self._memory.getvalue()[:size]  # all of it is not copied
        return await asyncio.to_thread(_read, self._file, size)

    async def _receive_part(self) -> None:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part: bytes = message.get("body", b"")
        self.more = message.get("more_body", False)
        self.size += len(part)
        if self._file is None and self._take_memory():
            self._memory.write(part)
        else:
            await self._write_file(part)

    def _take_memory(self) -> bool:
        size = max(0, self.size - UNCOUNTED) - self._memory_taken
        if size and not self._spool.take_memory(size):
            return False
        self._memory_taken += size
        return True

    async def _write_file(self, part: bytes) -> None:
        try:
            if self._file is None:
                self._file = await asyncio.to_thread(self._spool.open_file)
                part = self._memory.getvalue() + part
                self._memory = io.BytesIO()
                self._spool.return_memory(self._memory_taken)
                self._memory_taken = 0
            self._spool.take_file(self._owner, len(part))
            self._file_taken += len(part)
            await asyncio.to_thread(self._file.write, part)
        except OSError as error:
            raise NoRoomError(f"request body: cannot be kept while it arrives: {error}", _RETRY_S) from error


def _read(file: IO[bytes], size: int) -> bytes:
    file.seek(0)
    return file.read(size)
