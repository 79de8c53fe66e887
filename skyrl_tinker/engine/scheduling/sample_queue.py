"""Queue of waiting samples: round robin over sessions, so that no session delays the others."""

import math
from collections import OrderedDict, deque
from collections.abc import Container, Sequence
from itertools import islice

from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.protocol.queue_views import SHOWN, QueueView
from skyrl_tinker.store.futures.queue import QueuedRow


class SampleQueue:
    """Round robin over sessions; first in, first out within each."""

    def __init__(self) -> None:
        self._queues: OrderedDict[SessionId, deque[QueuedRow]] = OrderedDict()  # the next session first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, rows: Sequence[QueuedRow]) -> None:
        """Append rows in the order of their ids, which are higher than all before."""
        for row in rows:
            self._queues.setdefault(row.session_id, deque()).append(row)
        self._count += len(rows)

    def pop(self) -> QueuedRow:
        """Remove and return the next row. There must be one."""
        session, queue = next(iter(self._queues.items()))
        row = queue.popleft()
        self._count -= 1
        self._queues.move_to_end(session)
        if not queue:
            del self._queues[session]
        return row

    def discard(self, ids: Container[int]) -> None:
        """Remove the rows with these future ids; ids that do not wait are ignored."""
        for session, queue in list(self._queues.items()):
            kept = deque(row for row in queue if row.id not in ids)
            self._count -= len(queue) - len(kept)
            if kept:
                self._queues[session] = kept
            else:
                del self._queues[session]

    def view(self) -> tuple[dict[str, QueueView], int]:
        """Return the queues by session, the next one first, and the stride: one row in so many is shown."""
        stride = max(1, math.ceil(self._count / SHOWN))
        queues = {
            str(session): QueueView(tuple(row.id for row in islice(queue, 0, None, stride)), len(queue))
            for session, queue in self._queues.items()
        }
        return queues, stride
