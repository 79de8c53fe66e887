"""Bound on the host memory of all models' captured state."""

import asyncio
from collections.abc import Sequence

from skyrl_tinker.domain.ids import ModelKey

SHARE = 4
"""Captured state takes at most 1 / SHARE of a host's memory."""


class CapturedBytes:
    """Bytes captured on all ranks together, with their bound.

    The bound is that of the smallest host, as one host may hold everything: rank 0's holds all adapters. If
    nothing is captured, one capture is always allowed. A capture counts as its model's weights in float32, or
    with the optimizer's moments as its whole state.
    """

    def __init__(self) -> None:
        self.most = 0
        self._of_model: dict[ModelKey, tuple[int, int]] = {}  # weights, state
        self._held: dict[int, int] = {}  # by number of the capture
        self._freed = asyncio.Event()

    def know(self, model: ModelKey, weight_bytes: int, state_bytes: int) -> None:
        self._of_model[model] = weight_bytes, state_bytes

    def forget(self, model: ModelKey) -> None:
        self._of_model.pop(model, None)

    @property
    def held(self) -> int:
        return sum(self._held.values())

    def size(self, model: ModelKey, *, optimizer: bool) -> int:
        """Return the bytes of a capture, with or without the moments; 0 of an unknown model."""
        return self._of_model.get(model, (0, 0))[optimizer]

    def fitting(self, sizes: Sequence[int]) -> int:
        """Return how many captures of these sizes, from the first on, may be held together now."""
        left, count = self.most - self.held, 0
        for size in sizes:
            left -= size
            if left < 0 and (count or self._held):
                break
            count += 1
        return count

    def take(self, number: int, size: int) -> None:
        self._held[number] = size

    def holds(self, number: int) -> bool:
        return number in self._held

    def free(self, number: int) -> None:
        """Idempotent."""
        if self._held.pop(number, None) is not None:
            self._freed.set()
            self._freed = asyncio.Event()

    def next_free(self) -> asyncio.Event:
        """Return the event of the next `free`; it is set if nothing is captured."""
        freed = self._freed if self._held else asyncio.Event()
        if not self._held:
            freed.set()
        return freed
