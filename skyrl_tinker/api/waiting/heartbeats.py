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


class Heartbeats:
    """Writes the heartbeats of all clients of this process together, so that 10,000 of them cost little."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[Beat, asyncio.Future[None]] = {}
        self._came = asyncio.Event()

    async def keep(self, owner: OwnerId | None, session: SessionId) -> None:
        """Keep a session alive. NotFoundError: this owner has none such; GoneError: it is finished."""
        written = self._waiting.setdefault((owner, session), asyncio.get_running_loop().create_future())
        self._came.set()
        await asyncio.shield(written)

    async def run(self) -> None:
        """Write what comes, until it is cancelled."""
        while True:
            await self._came.wait()
            await asyncio.sleep(TOGETHER_S)
            self._came.clear()
            waiting, self._waiting = self._waiting, {}
            failed: Mapping[Beat, Exception]
            try:
                failed = await self._store.write(partial(session_records.heartbeat, beats=list(waiting)))
            except Exception as error:  # becomes the answer to each
                failed = dict.fromkeys(waiting, error)
            for beat, written in waiting.items():
                if (why := failed.get(beat)) is None:
                    written.set_result(None)
                else:
                    written.set_exception(why)
                    written.exception()  # whoever waited may have gone
