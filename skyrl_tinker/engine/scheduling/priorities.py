"""Priorities of requests in progress, by which a sampler divides its KV cache among owners."""

from collections.abc import Iterator
from contextlib import contextmanager

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
        self._tags: dict[object, int] = {}  # of requests in progress
        self._ends: dict[Share, int] = {}  # of each share's last request

    @contextmanager
    def take(self, share: Share, tokens: int) -> Iterator[int]:
        """Yield the priority of a request that computes at most `tokens`; lower is earlier."""
        now = min(self._tags.values(), default=0)
        if not self._tags or len(self._ends) > KEPT + 2 * len(self._tags):
            self._ends = {each: end for each, end in self._ends.items() if self._tags and end > now}
        tag = max(now, self._ends.get(share, 0))
        self._ends[share] = tag + tokens
        request = object()
        self._tags[request] = tag
        try:
            yield tag
        finally:
            del self._tags[request]
