"""Priorities of requests under way, by which a sampler divides its KV cache among those who ask."""

from collections.abc import Iterator
from contextlib import contextmanager

from skyrl_tinker.domain.ids import OwnerId, SessionId

Share = OwnerId | SessionId | None
"""Whose request it is: the owner's, without keys the session's; None: the engine's own."""
KEPT = 64


def share_of(owner: OwnerId | None, session: SessionId) -> Share:
    return session if owner is None else owner


class Priorities:
    """Start tags as in FairShare, of what samplers have already, in tokens.

    A request starts where its share's last one ends, but not before the earliest of those under way: a small
    one is ahead of the rest of a flood, which never falls behind for good. A sampler lets in the lowest tag
    first; when its KV cache is full it computes that with the highest again later. How much fits the cache
    need not be known, nor how long sequences become.
    """

    def __init__(self) -> None:
        self._tags: dict[object, int] = {}  # of requests under way
        self._ends: dict[Share, int] = {}  # of each share's last request

    @contextmanager
    def take(self, share: Share, tokens: int) -> Iterator[int]:
        """Yield the priority of a request that computes at most so many tokens, lower is earlier."""
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
