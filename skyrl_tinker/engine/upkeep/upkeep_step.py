"""Steps of the clean-up: each has its own interval, and none waits for another or fails with it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sqlalchemy.exc import OperationalError

from skyrl_tinker.errors import SamplerError, StorageError

SWEEP_S = 3.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """`name`: of the objects that it tidies up. `every_s`: seconds between its runs, at least SWEEP_S.

    `run` returns False if a part of it failed, after logging it.
    """

    name: str
    run: Callable[[], Awaitable[bool | None]]
    every_s: float = 0.0

    async def repeat(self) -> None:
        """Run it indefinitely; a failed run is retried with the next sweep."""
        done = False
        while True:
            await asyncio.sleep(max(SWEEP_S, self.every_s if done else 0.0))
            done = await self.tried()

    async def tried(self) -> bool:
        """Run it once; log a failure and return False."""
        try:
            return await self.run() is not False
        except (SamplerError, StorageError, OperationalError, OSError) as error:
            # The sampler or the storage is down, or a disk is full: the engine goes on.
            _log.warning("clean-up of %s is tried again in %.0f s: %s", self.name, SWEEP_S, error)
        except Exception:  # an unforeseen fault of a step must not end the engine
            _log.exception("clean-up of %s failed, it is tried again in %.0f s", self.name, SWEEP_S)
        return False
