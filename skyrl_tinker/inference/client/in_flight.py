"""Requests under way, by tag, so that those of one tag can be aborted."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import uuid4


@dataclass(eq=False)
class Attempt:
    """One HTTP request. `switched`: its tag was aborted, so that it goes on under other weights."""

    id: str = field(default_factory=lambda: uuid4().hex)
    switched: bool = False

    @property
    def vllm_id(self) -> str:
        """The name by which /inference/v1/abort_requests ends it, with all of its n sequences."""
        return f"generate-tokens-{self.id}"


class InFlight:
    """Registry of attempts, oldest first. Picklable: a copy starts empty."""

    def __init__(self) -> None:
        self._attempts: defaultdict[str | None, dict[str, Attempt]] = defaultdict(dict)

    def __reduce__(self) -> tuple[type["InFlight"], tuple[()]]:
        return InFlight, ()

    @contextmanager
    def attempt(self, tag: str | None) -> Iterator[Attempt]:
        attempt = Attempt()
        self._attempts[tag][attempt.id] = attempt
        try:
            yield attempt
        finally:
            del self._attempts[tag][attempt.id]
            if not self._attempts[tag]:
                del self._attempts[tag]

    def tags(self) -> list[str]:
        """List the tags with requests under way."""
        return [tag for tag in self._attempts if tag is not None]

    def switch(self, tag: str) -> list[Attempt]:
        """Mark all that are under way with this tag as switched and return them."""
        attempts = list(self._attempts.get(tag, {}).values())
        for attempt in attempts:
            attempt.switched = True
        return attempts

    def still(self, attempts: list[Attempt], tag: str) -> list[Attempt]:
        """Return those of them that have not ended."""
        under_way = self._attempts.get(tag, {})
        return [attempt for attempt in attempts if attempt.id in under_way]
