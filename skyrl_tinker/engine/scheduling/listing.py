"""Lists of the requests that wait, as API processes ask for them."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

LISTED_S = 0.9
"""Longest age of a list. Each API process asks once a second, and to list all requests takes milliseconds."""
T = TypeVar("T")


class Listing(Generic[T]):
    """A list for all who ask within LISTED_S."""

    def __init__(self, make: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        self._made: tuple[float, T] | None = None  # when, and the list

    def get(self) -> T:
        """Return the list, made again if it is older."""
        now = self._clock()
        if self._made is None or now > self._made[0] + LISTED_S:
            self._made = now, self._make()
        return self._made[1]
