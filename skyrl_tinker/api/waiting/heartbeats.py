"""Heartbeats of sessions, which are most of the requests of a server with many clients."""

import asyncio
from collections.abc import Mapping
from functools import partial

from skyrl_tinker.domain.ids import OwnerId, SessionId
from skyrl_tinker.store import session_records
from skyrl_tinker.store.session_records import Beat
from skyrl_tinker.store.store import Store

TOGETHER_S = 0.25
"""Time for which a heartbeat waits for others: clients send one in ten seconds and need no answer before."""


class _Batch:
    """Heartbeats that are written together. `failed`: why some were not, once `written` is set."""

    def __init__(self) -> None:
        self.beats: dict[Beat, None] = {}
        self.written = asyncio.Event()
        self.failed: Mapping[Beat, Exception] = {}


class Heartbeats:
    """Writes the heartbeats of all clients of this process together, so that 10,000 of them cost little."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batch = _Batch()
        self._came = asyncio.Event()

    async def keep(self, owner: OwnerId | None, session: SessionId) -> None:
        """Keep a session alive. NotFoundError: this owner has none such; GoneError: it is finished."""
        batch, beat = self._batch, (owner, session)
        batch.beats[beat] = None
        self._came.set()
        await batch.written.wait()
        if (why := batch.failed.get(beat)) is not None:
            raise why

    async def run(self) -> None:
        """Write arriving heartbeats, until cancelled."""
        while True:
            await self._came.wait()
            await asyncio.sleep(TOGETHER_S)
            self._came.clear()
            batch, self._batch = self._batch, _Batch()
            try:
                batch.failed = await self._store.write(
                    partial(session_records.heartbeat, beats=list(batch.beats))
                )
            except Exception as error:  # of the database, or unforeseen: all who wait get it as their answer
                batch.failed = dict.fromkeys(batch.beats, error)
            batch.written.set()
