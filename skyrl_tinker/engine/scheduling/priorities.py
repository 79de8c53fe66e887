"""Priorities of requests in progress, by which a sampler divides its KV cache among owners."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heappush

from skyrl_tinker.domain.ids import OwnerId, SessionId

Share = OwnerId | SessionId | None
"""Key under which a request counts: its owner, without keys its session; None: the engine itself."""
KEPT = 64


def share_of(owner: OwnerId | None, session: SessionId) -> Share:
    return session if owner is None else owner


class Priorities:
    """Start tags as in FairShare, in tokens, for requests that samplers have already.

    A request starts where its share's last one ends, but not before the earliest request in progress: a small
    request is ahead of the rest of a flood, which is not delayed forever either. A sampler admits the lowest
    tag first; when its KV cache is full, it preempts the highest and computes it again later. Neither the
    cache's capacity nor the lengths of sequences need be known.
    """

    def __init__(self) -> None:
        self._tags: list[tuple[int, int]] = []  # a heap of (tag, number), also of requests that have ended
        self._running: set[int] = set()  # numbers of those in progress
        self._numbers = itertools.count()
        self._ends: dict[Share, int] = {}  # of each share's last request

    @contextmanager
    def take(self, share: Share, tokens: int, sequences: int = 1) -> Iterator[int]:
        """Yield the priority of a request that computes at most `tokens`; lower is earlier.

        All its `sequences` have the same: where the last one begins, or others would wait for all of them.
        """
        now, most = self._earliest(), KEPT + 2 * len(self._running)
        if not self._running or len(self._ends) > most:
            self._ends = {each: end for each, end in self._ends.items() if self._running and end > now}
        if len(self._tags) > most:  # the earliest may run for long
            self._tags = [each for each in self._tags if each[1] in self._running]
            heapify(self._tags)
        tag = max(now, self._ends.get(share, 0))
        self._ends[share] = tag + tokens
        number = next(self._numbers)
        heappush(self._tags, (tag, number))
        self._running.add(number)
        try:
            yield tag + tokens - tokens // sequences
        finally:
            self._running.remove(number)

    def _earliest(self) -> int:
        """Return the lowest tag of a request in progress, 0 without one."""
        while self._tags and self._tags[0][1] not in self._running:
            heappop(self._tags)
        return self._tags[0][0] if self._tags else 0
