"""Values that many ask for, and that take time to make."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")
KEPT_S = 1.0


class KeptValue(Generic[T]):
    """Value that is made once in KEPT_S, so that ten who ask cost as much as one."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._making = asyncio.Lock()
        self.made: tuple[float, T] | None = None
        """When it was made, by time.monotonic(), and the value."""

    async def get(self) -> T:
        """Return the value, at most KEPT_S old."""
        async with self._making:  # those who come meanwhile get the same one
            if self.made is None or time.monotonic() - self.made[0] >= KEPT_S:
                value = await self._make()
                self.made = time.monotonic(), value
            return self.made[1]
