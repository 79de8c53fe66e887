"""Commits of the effects of units of work, in the order in which they ran, and their writes to disk.

A unit that was not committed runs again after a crash, and nobody has seen its results. So a unit must never
be in the database before those that ran before it. If one cannot be committed at all, the ranks are ahead of
the journal: the engine ends, and the next one replays.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_tinker.domain.ids import Effect
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.futures.finish import FutureOutcome, Ran

MOST = 64
"""Most units in one transaction."""
REPLAYED = frozenset({Effect.GRADIENTS, Effect.STEP})
"""Effects whose replay needs the body of the request."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnitEnd:
    """End of a unit, committed as one. All keys are ids of futures.

    `effects`: of the requests that ran in unit number `unit`. `outcomes`: of the requests answered here;
    `answered`: requests that `ops` answer. `row_budget`: tokens per row of a pass.
    """

    outcomes: Mapping[int, FutureOutcome]
    ops: tuple[Op[Any], ...] = ()
    unit: int | None = None
    effects: Mapping[int, Effect | None] = field(default_factory=dict)
    row_budget: int | None = None
    answered: tuple[int, ...] = ()

    @property
    def replayed(self) -> set[int]:
        """Requests whose bodies must stay."""
        return {future_id for future_id, effect in self.effects.items() if effect in REPLAYED}

    @property
    def ran(self) -> dict[int, Ran]:
        if self.unit is None:
            return {}
        return {id_: Ran(self.unit, effect, self.row_budget) for id_, effect in self.effects.items()}


@dataclass(frozen=True, slots=True)
class _Entry:
    end: "asyncio.Future[UnitEnd]"
    committed: "asyncio.Future[None]"

    @property
    def of_unit(self) -> bool:
        """True if work of the ranks is lost without this commit, also if it could not be encoded."""
        return self.end.exception() is not None or self.end.result().unit is not None


class UnitCommits:
    """Queue of ends of units. Use it from one event loop; nothing is committed unless `run` is running."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._queue: deque[_Entry] = deque()
        self._more = asyncio.Event()

    def add(self, end: UnitEnd | Awaitable[UnitEnd]) -> "asyncio.Future[None]":
        """Queue the end of a unit, which may still be in encoding; returns a future, done once committed.

        If an op raises, nothing of this end is committed and the future has the error. Other ends are still
        committed; but if this one is of a unit, `run` raises the error.
        """
        loop = asyncio.get_running_loop()
        if isinstance(end, UnitEnd):
            known: asyncio.Future[UnitEnd] = loop.create_future()
            known.set_result(end)
        else:
            known = asyncio.ensure_future(end)
        entry = _Entry(known, loop.create_future())
        entry.committed.add_done_callback(_log_failure)
        self._queue.append(entry)
        self._more.set()
        return entry.committed

    async def run(self) -> None:
        """Commit indefinitely."""
        while True:
            self._more.clear()
            while self._queue:
                await asyncio.wait([self._queue[0].end])
                ready = itertools.takewhile(lambda entry: entry.end.done(), self._queue)
                await self._commit(list(itertools.islice(ready, MOST)))
            await self._more.wait()

    async def drain(self) -> None:
        """Wait until all ends added so far are committed."""
        if self._queue:
            await asyncio.wait([entry.committed for entry in self._queue])

    async def _commit(self, entries: list[_Entry]) -> None:
        """Commit several ends together; if that fails, each separately."""
        try:
            await self._send([entry.end.result() for entry in entries])
        except Exception as error:  # becomes the result of the end at fault
            if len(entries) > 1:
                for entry in entries:
                    await self._commit([entry])
                return
            entry = self._queue.popleft()
            entry.committed.set_exception(error)
            if entry.of_unit:
                raise
            return
        for entry in entries:
            self._queue.popleft()
            self._outbox.note_answered(entry.end.result().answered)
            entry.committed.set_result(None)

    async def _send(self, ends: list[UnitEnd]) -> None:
        outcomes = [item for end in ends for item in end.outcomes.items()]
        ops = [op for end in ends for op in end.ops]
        replayed = set[int]().union(*(end.replayed for end in ends))
        ran = {future_id: ran for end in ends for future_id, ran in end.ran.items()}
        await self._outbox.send(outcomes, *ops, replayed=replayed, ran=ran)


class PendingWrites:
    """Writes in progress: those that need the ranks, for which a recovery waits, and those with files."""

    def __init__(self) -> None:
        self._on_ranks: set[int] = set()  # by the id of its future, or a number of its own
        self._here: set[int] = set()  # to be stored, answered or loaded by samplers
        self._changed = asyncio.Event()

    def follow(self, number: int, write: "asyncio.Task[Any]") -> None:
        """Record that a write needs the ranks, until that is noted otherwise or it has ended."""
        self._on_ranks.add(number)
        write.add_done_callback(lambda _: self._end(number))

    def note_here(self, number: int) -> None:
        """Record that a write needs the ranks no more: its files are on this host."""
        if number in self._on_ranks:
            self._on_ranks.discard(number)
            self._here.add(number)
            self._changed.set()

    def _end(self, number: int) -> None:
        self._on_ranks.discard(number)
        self._here.discard(number)
        self._changed.set()

    def is_here(self, number: int) -> bool:
        """Return whether a save goes on without the ranks: a replay need not repeat it."""
        return number in self._here

    async def settle(self) -> None:
        """Wait until no write needs the ranks."""
        while self._on_ranks:
            self._changed.clear()
            await self._changed.wait()


def _log_failure(committed: "asyncio.Future[None]") -> None:
    if not committed.cancelled() and (error := committed.exception()):
        _log.warning("the end of a unit was not committed: %s", error)
