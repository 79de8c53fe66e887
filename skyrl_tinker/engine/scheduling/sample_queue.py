"""Samples that wait: sessions take turns, one sample each, so that a flood of one keeps no other waiting."""

import math
from collections import OrderedDict, deque
from collections.abc import Container, Sequence
from itertools import islice

from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.protocol.queue_views import SHOWN, QueueView
from skyrl_tinker.store.futures.queue import QueuedRow


class SampleQueue:
    """Of one session in the order of their ids."""

    def __init__(self) -> None:
        self._queues: OrderedDict[SessionId, deque[QueuedRow]] = OrderedDict()  # who is next comes first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, rows: Sequence[QueuedRow]) -> None:
        """In the order of their ids, which are higher than those of all before."""
        for row in rows:
            self._queues.setdefault(row.session_id, deque()).append(row)
        self._count += len(rows)

    def take(self) -> QueuedRow:
        """The next one. There must be one."""
        session, queue = next(iter(self._queues.items()))
        row = queue.popleft()
        self._count -= 1
        self._queues.move_to_end(session)
        if not queue:
            del self._queues[session]
        return row

    def drop(self, ids: Container[int]) -> None:
        """By future id; those that do not wait are passed over."""
        for session, queue in list(self._queues.items()):
            kept = deque(row for row in queue if row.id not in ids)
            self._count -= len(queue) - len(kept)
            if kept:
                self._queues[session] = kept
            else:
                del self._queues[session]

    def view(self) -> tuple[dict[str, QueueView], int]:
        """By session, who is next first, and of how many one is shown."""
        stride = max(1, math.ceil(self._count / SHOWN))
        queues = {
            str(session): QueueView(tuple(row.id for row in islice(queue, 0, None, stride)), len(queue))
            for session, queue in self._queues.items()
        }
        return queues, stride
