"""Requests and tokens by owner, for a few owners by name."""

from collections.abc import Awaitable, Callable, Iterable

from prometheus_client import Counter

from skyrl_tinker.domain.ids import OwnerId

MOST = 20
OTHERS = "(other)"
"""Label of owners beyond the first MOST; no key can have this name."""
OwnerName = Callable[[OwnerId | None], Awaitable[str | None]]
"""Function that returns the name of an owner, None while the store fails."""


class OwnerMetrics:
    """Counters with the names of keys as labels, for the first MOST owners since the engine started.

    Each owner costs a series per kind of request, and Prometheus keeps the series of deleted keys.
    """

    def __init__(self, counter: Callable[..., Counter], name: OwnerName | None) -> None:
        """`counter`: (name, help, labels) -> counter.

        Counts nothing if `name` is None: names and activities of owners are not public.
        """
        self._name = name
        self._labels: dict[OwnerId | None, str] = {}
        by = "by the key's name (setting metrics_key)"
        self._requests = counter("owner_requests", f"Requests answered, {by}", "owner", "kind")
        self._trained = counter("owner_trained_tokens", f"Tokens through the trainer, {by}", "owner")
        self._sampled = counter("owner_sampled_tokens", f"Tokens generated, {by}", "owner")

    async def know(self, owners: Iterable[OwnerId | None]) -> None:
        """Give owners their labels, before any of their requests is counted."""
        for owner in owners:
            if self._name is None or owner in self._labels or len(self._labels) == MOST:
                continue
            if (name := await self._name(owner)) is not None:
                self._labels[owner] = name

    def answered(self, owner: OwnerId | None, kind: str) -> None:
        if self._name is not None:
            self._requests.labels(self._label(owner), kind).inc()

    def trained(self, owner: OwnerId | None, tokens: int) -> None:
        if self._name is not None:
            self._trained.labels(self._label(owner)).inc(tokens)

    def sampled(self, owner: OwnerId | None, tokens: int) -> None:
        if self._name is not None:
            self._sampled.labels(self._label(owner)).inc(tokens)

    def _label(self, owner: OwnerId | None) -> str:
        return self._labels.get(owner, OTHERS)
