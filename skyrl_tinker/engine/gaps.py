"""Gaps: seq_ids of a model that are missing while later ones wait. Those that never arrive are failed.

A client takes a request's seq_id before it builds the request, so an error of the client leaves a gap. Only
the first chunk of a pass is sent after later ones, and without delay: a request that is not in transit soon
after them never arrives. The store has the failures before the lanes do, so that a late request and the next
engine find them.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.bases.train_dispatch import TrainDispatch
from skyrl_tinker.engine.scheduling.lanes import Gap
from skyrl_tinker.engine.suspends import Suspends
from skyrl_tinker.store import server_state, session_records
from skyrl_tinker.store.database.abstract_database import after_commit
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import expected_requests
from skyrl_tinker.store.futures.finish import fail_missing
from skyrl_tinker.store.store import Store

GAP_S = 900.0
"""Longest time that a model waits, also for a client that is away. The SDK tries to send one for 300 s."""
QUIET_S = 2.0
"""Seconds after which a missing request that is not in transit is given up, if its client is alive."""
NOTED_S = 1.0
"""Seconds from a successful write until API processes, too, have recorded the requests in transit."""
MOST = 4096
"""Most seq_ids of a gap that are failed; a larger gap is an error of the client, and ends its model."""
_log = logging.getLogger(__name__)


class Gaps:
    def __init__(self, store: Store, bell: Doorbell, trainer: TrainDispatch) -> None:
        self._store = store
        self._bell = bell
        self._trainer = trainer
        self._seen: dict[ModelKey, tuple[Gap, float]] = {}  # when it was first seen
        self._written: dict[ModelKey, float] = {}  # when the database took a write, late in the wait
        self._suspends = Suspends(store.now)

    async def close(self, now: float) -> None:
        """Fail the seq_ids that never arrive. `now`: seconds since the epoch."""
        if self._suspends.noticed():
            self._seen, self._written = {}, {}
        seen, open_gaps = self._seen, self._trainer.gaps()
        self._seen = {
            model: seen[model] if model in seen and seen[model][0] == gap else (gap, now)
            for model, gap in open_gaps.items()
        }
        due = {model: gap for model, (gap, since) in self._seen.items() if now - since >= QUIET_S}
        self._written = {model: at for model, at in self._written.items() if model in due}
        try:
            if due.keys() - self._written:
                await self._store.write(lambda conn: server_state.put(conn, server_state.GAPS, now))
                self._written |= dict.fromkeys(due.keys() - self._written, now)
            if noted := {model: due[model] for model, at in self._written.items() if now - at >= NOTED_S}:
                await self._close(noted, now)
        except OperationalError:  # requests in transit could not be recorded either: wait anew
            self._seen, self._written = {}, {}

    async def _close(self, due: Mapping[ModelKey, Gap], now: float) -> None:
        never = await self._store.fetch(lambda conn: self._never(conn, due, now))
        large = {model: _too_large(gap) for model, gap in never.items() if len(gap.seq_ids) > MOST}
        if large:
            await self._trainer.give_up(large)
        small = {model: gap for model, gap in never.items() if model not in large}
        if small:
            await self._store.write(
                lambda conn: self._fail(conn, self._never(conn, small, now)),
                lambda: self._bell.ring("engine"),
            )

    def _never(self, conn: Connection, due: Mapping[ModelKey, Gap], now: float) -> dict[ModelKey, Gap]:
        """Return the gaps that no client will fill."""
        return {model: gap for model, gap in due.items() if self._is_over(conn, model, gap, now)}

    def _is_over(self, conn: Connection, model: ModelKey, gap: Gap, now: float) -> bool:
        of_model, of_owner = expected_requests.expected(conn, model, gap.owner_id, now)
        _, since = self._seen[model]
        if now - since >= GAP_S:  # without keys all clients are one owner, who always sends something
            return not of_model
        return not (of_model or of_owner) and session_records.beats(conn, gap.session_id, now)

    def _fail(self, conn: Connection, never: Mapping[ModelKey, Gap]) -> None:
        for model, gap in never.items():
            if missing := fail_missing(conn, model, gap.seq_ids, _never_came(gap)):
                told = "model %s: seq_ids %s never came, and are failed", model, missing
                after_commit(conn, partial(_log.warning, *told))


def _never_came(gap: Gap) -> Callable[[int], Failure]:
    def failure(seq_id: int) -> Failure:
        return Failure(
            f"seq {seq_id} of this model never came, though its client sent {gap.seq_ids.stop}: a request "
            "that the client could not build or send still takes its number. It counts as a failed one: the "
            "weights stay as they are, and the gradients of its window are dropped",
            "user",
        )

    return failure


def _too_large(gap: Gap) -> Failure:
    return Failure(
        f"seq {gap.seq_ids.start} of this model did not arrive: the server has {gap.seq_ids.stop}, and "
        f"expected at most {MOST} numbers between two requests. Requests of a model run in order, so no "
        "later one can run: make a new model, from the last checkpoint if there is one",
        "user",
    )
