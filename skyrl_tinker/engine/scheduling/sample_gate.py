"""Gate of one base model, before its samplers."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skyrl_tinker.errors import SamplerError


class SampleGate:
    """Requests for samples pass while it is open; else they wait, or fail where the samplers do not start."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why it is closed."""
        self.asked = asyncio.Event()
        """Set when a request has to wait."""
        self._refuses = False
        self._changed = asyncio.Event()
        self._users = 0  # inside, or waiting
        self._left_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last request left it, or it was opened; 0 while any is inside, or waits."""
        return 0.0 if self._users else time.monotonic() - self._left_at

    @property
    def in_use(self) -> bool:
        """True while any request is inside, or waits."""
        return self._users > 0

    def close(self, reason: str, *, refuses: bool = False) -> None:
        self._set(reason, refuses=refuses)

    def open(self) -> None:
        self._left_at = time.monotonic()
        self._set(None, refuses=False)

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Enclose the use of samplers by a request, which waits until the gate is open.

        Raises SamplerError with the reason if it refuses.
        """
        self._users += 1
        try:
            while self.reason is not None:
                if self._refuses:
                    raise SamplerError(self.reason)
                self.asked.set()
                await self._changed.wait()
            yield
        finally:
            self._users -= 1
            self._left_at = time.monotonic()

    def _set(self, reason: str | None, *, refuses: bool) -> None:
        self.reason, self._refuses = reason, refuses
        self._changed.set()
        self._changed = asyncio.Event()
