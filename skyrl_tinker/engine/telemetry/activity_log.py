"""Spans of recent work, for traces: bounded, in memory, lost with the engine."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from skyrl_tinker.engine.scheduling.row_work import PASSES, cost
from skyrl_tinker.protocol.activity import Activity, PublishSpan, RankSpan, SampleSpan, SyncSpan, UnitSpan
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.training.actors import RankReply

SPANS = 10_000
"""Spans of each kind that are kept."""
UNIT_ROWS = 256
"""Most requests that a unit names."""
UNIT_CALLS = 64
"""Most calls of a rank that a unit shows: the last ones, if it was repeated often."""

AnySpan = UnitSpan | SampleSpan | PublishSpan | SyncSpan


class ActivityLog:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: that of the times in rows, which are shown with the spans."""
        self._clock = clock
        kinds = UnitSpan, SampleSpan, PublishSpan, SyncSpan  # in the order of Activity
        self._spans: dict[type[AnySpan], deque[Any]] = {kind: deque(maxlen=SPANS) for kind in kinds}
        self._calls: dict[str, deque[tuple[RankSpan, ...]]] = {}  # by base model
        self._followers: list[Callable[[AnySpan], None]] = []

    def follow(self, follower: Callable[[AnySpan], None]) -> None:
        """Call `follower` with each span from now on; it must return at once."""
        self._followers.append(follower)

    def ranks(self, base_model: str, method: str, replies: Sequence[RankReply]) -> None:
        """Record a call of all ranks of a base model, as a part of its unit that ends next.

        They use this host's clock.
        """
        skew_s = self._clock() - time.time()
        begun = [reply.began_at + skew_s for reply in replies]
        self._calls.setdefault(base_model, deque(maxlen=UNIT_CALLS)).append(
            tuple(
                RankSpan(rank, method, began_at, began_at + reply.seconds)
                for rank, (began_at, reply) in enumerate(zip(begun, replies, strict=True))
            )
        )

    def unit(self, base_model: str, rows: Sequence[QueuedRow], began_at: float) -> None:
        """Record a unit of a base model that has just ended."""
        calls = tuple(chain.from_iterable(self._calls.pop(base_model, ())))
        tokens = sum(cost(row) for row in rows if row.kind in PASSES)
        ids = tuple(row.id for row in rows[:UNIT_ROWS])
        self._note(UnitSpan(rows[0].kind, began_at, self._clock(), tokens, ids, calls, base_model))

    def sample(self, future_id: int, began_at: float, replicas: Iterable[str] = ()) -> None:
        """Record a sample that has just ended."""
        self._note(SampleSpan(future_id, began_at, self._clock(), tuple(replicas)))

    def publish(self, weights: str, future_id: int, seconds: float) -> None:
        """Record weights that have just been published."""
        now = self._clock()
        self._note(PublishSpan(weights, future_id, now - seconds, now))

    def sync(self, base_model: str, version: str, seconds: float, paused_s: float) -> None:
        """Record a sync of full parameters of a base model that has just ended."""
        now = self._clock()
        self._note(SyncSpan(version, now - seconds, now - paused_s, now, base_model))

    def since(self, at: float) -> Activity:
        """Return the spans that ended at `at` or later."""
        return Activity(
            *(tuple(span for span in spans if span.ended_at >= at) for spans in self._spans.values())
        )

    def _note(self, span: AnySpan) -> None:
        self._spans[type(span)].append(span)
        for follower in self._followers:
            follower(span)
