"""Intake of new requests: read when the doorbell rings, at most a second late, and passed to the drivers."""

import logging
from dataclasses import dataclass, replace

from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.engine.bases.sample_dispatch import SampleDispatch
from skyrl_tinker.engine.bases.train_dispatch import TrainDispatch
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import StatementError
from skyrl_tinker.store.database.rows import PAGE
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.store import Store

FALLBACK_POLL_S = 1.0
MOST_BODIES = 4096
"""Waiting samples above which further ones wait without their bodies, of up to SMALL_BYTES each."""
_SAMPLING = frozenset({RequestKind.SAMPLE, RequestKind.CANCEL_SAMPLE})
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Intake:
    _store: Store
    _bell: Doorbell
    _trainer: TrainDispatch
    _samples: SampleDispatch
    _metrics: Metrics

    def __post_init__(self) -> None:
        self.cursor = 0  # the drivers have all requests up to this id

    async def run(self, cursor: int) -> None:
        """Read requests indefinitely. `cursor`: those up to this id have finished."""
        self.cursor = cursor
        while True:
            try:
                while await self._read_page():
                    pass
            except (OperationalError, StatementError) as error:
                # A database that fails briefly costs one round: the cursor has not moved.
                _log.warning("new requests could not be read, trying again: %s", error)
            await self._bell.wait(FALLBACK_POLL_S)

    async def _read_page(self) -> bool:
        """Hand over one page of new rows; returns True if there may be more."""
        rows = await self._store.read(lambda conn: queue.queued_after(conn, self.cursor, PAGE))
        if rows:
            if self._samples.queued() > MOST_BODIES:
                rows = [replace(row, body=None) if row.kind is RequestKind.SAMPLE else row for row in rows]
            await self._metrics.owners.know({row.owner_id for row in rows})
            if training := [row for row in rows if row.kind not in _SAMPLING]:
                await self._trainer.submit(training)
            self._metrics.arrived(row for row in rows if row.kind in _SAMPLING)
            await self._samples.submit([row for row in rows if row.kind is RequestKind.SAMPLE])
            self.cursor = rows[-1].id
            if cancels := [row for row in rows if row.kind is RequestKind.CANCEL_SAMPLE]:
                await self._samples.cancel(cancels)
        return len(rows) == PAGE
