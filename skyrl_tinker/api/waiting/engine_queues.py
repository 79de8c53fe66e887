"""What waits in the engine: looked at when somebody here wants to know and while samples wait, at most once a
second."""

import asyncio
import logging
import time

from pydantic import ValidationError

from skyrl_tinker.api.waiting.engine_client import EngineClient, EngineUnavailableError
from skyrl_tinker.protocol.queue_views import QueuesView, SamplingView, queues_from_bytes

EVERY_S = 1.0
PATIENCE_S = 2.0  # of a long poll that is over: its answer may go without a reason
_log = logging.getLogger(__name__)


class EngineQueues:
    """`run` as a task. Samples are counted between two looks: those that this process accepts."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._wanted = asyncio.Event()
        self._looked = asyncio.Event()  # set and replaced at each look
        self._seen: QueuesView | None = None
        self._seen_at = 0.0
        self._accepted = 0
        self._waiting = 0  # samples, at the last look

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self._look()
            self._looked.set()
            self._looked = asyncio.Event()
            await asyncio.sleep(EVERY_S)

    async def seen(self) -> QueuesView | None:
        """As they were a moment ago; None while the engine does not answer."""
        if time.monotonic() - self._seen_at > EVERY_S:
            self._wanted.set()
            try:
                await asyncio.wait_for(self._looked.wait(), PATIENCE_S)
            except TimeoutError:
                return None
        return self._seen

    def sample_accepted(self) -> None:
        self._accepted += 1
        self._wanted.set()

    def samples_waiting(self) -> int:
        """About how many are accepted and not sampled yet."""
        return self._waiting + self._accepted

    @property
    def samples_per_second(self) -> float | None:
        return self._seen.sampling.per_second if self._seen else None

    async def _look(self) -> None:
        counted = self._accepted
        try:
            self._seen = queues_from_bytes(await self._engine.get("/queues"))
        except (EngineUnavailableError, ValidationError) as error:  # it is starting: what has waited waits on
            _log.debug("the engine's queues are not known: %s", error)
            self._seen = None
        else:
            self._waiting = _pending(self._seen.sampling)
            self._accepted -= counted
        self._seen_at = time.monotonic()
        if self.samples_waiting():  # until there are none: who comes later must not be told of them
            self._wanted.set()


def _pending(sampling: SamplingView) -> int:
    return sampling.waiting + sampling.in_flight
