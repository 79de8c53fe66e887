"""Requests in progress, so that those of one tag or one model can be aborted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from secrets import token_hex


@dataclass(eq=False)
class Attempt:
    """One request. `switched`: its tag was aborted, so that it goes on under other weights.

    `model`: given if it may be interrupted for other requests at any time.
    """

    tag: str | None = None
    model: str | None = None
    id: str = field(default_factory=lambda: token_hex(16))
    switched: bool = False


class InFlight:
    """Registry of attempts, oldest first. Picklable: a copy starts empty."""

    def __init__(self) -> None:
        self._attempts: dict[str, Attempt] = {}

    def __reduce__(self) -> tuple[type["InFlight"], tuple[()]]:
        return InFlight, ()

    @contextmanager
    def attempt(self, tag: str | None, model: str | None = None) -> Iterator[Attempt]:
        attempt = Attempt(tag, model)
        self._attempts[attempt.id] = attempt
        try:
            yield attempt
        finally:
            del self._attempts[attempt.id]

    def tags(self) -> list[str]:
        """List the tags with requests in progress."""
        return list(dict.fromkeys(each.tag for each in self._attempts.values() if each.tag is not None))

    def switch(self, tag: str) -> list[Attempt]:
        """Mark all requests in progress with this tag as switched, and return them."""
        attempts = [each for each in self._attempts.values() if each.tag == tag]
        for attempt in attempts:
            attempt.switched = True
        return attempts

    def interruptible(self, model: str) -> list[Attempt]:
        """Return the requests of this model that may be interrupted."""
        return [each for each in self._attempts.values() if each.model == model]

    def still(self, attempts: list[Attempt]) -> list[Attempt]:
        """Return the attempts that have not ended."""
        return [attempt for attempt in attempts if attempt.id in self._attempts]
