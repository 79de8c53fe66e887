"""Bound of the host memory that captured state of all models takes."""

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import psutil

from skyrl_tinker.domain.ids import ModelKey

SHARE = 4
"""Captured state takes one part in so many of a host's memory."""
CGROUPS = Path("/sys/fs/cgroup")


def host_memory(own_cgroup: Path = Path("/proc/self/cgroup"), cgroups: Path = CGROUPS) -> int:
    """Return the bytes of this host's memory, or of what a cgroup (version 2) leaves this process of it."""
    limits = [psutil.virtual_memory().total]
    lines = own_cgroup.read_text().splitlines() if own_cgroup.exists() else []
    for name in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        own = cgroups / name
        for cgroup in (own, *own.parents[: len(own.parts) - len(cgroups.parts)]):
            limit = cgroup / "memory.max"
            text = limit.read_text().strip() if limit.exists() else "max"
            limits += [int(text)] if text.isdecimal() else []
    return min(limits)


class CapturedBytes:
    """Count of the bytes that are captured, of all ranks together, with their bound.

    The bound is that of the smallest host: one host may hold all, as of adapters rank 0's does. One capture
    is always allowed where there is none. A capture counts as the model's weights and moments.
    """

    def __init__(self) -> None:
        self.most = 0
        self._of_model: dict[ModelKey, int] = {}
        self._held: dict[int, int] = {}  # by number of the capture
        self._freed = asyncio.Event()

    def know(self, model: ModelKey, state_bytes: int) -> None:
        self._of_model[model] = state_bytes

    def forget(self, model: ModelKey) -> None:
        self._of_model.pop(model, None)

    @property
    def held(self) -> int:
        return sum(self._held.values())

    def fitting(self, models: Sequence[ModelKey]) -> int:
        """Return how many of these, from the first on, may be captured together now."""
        left, count = self.most - self.held, 0
        for model in models:
            left -= self._of_model.get(model, 0)
            if left < 0 and (count or self._held):
                break
            count += 1
        return count

    def take(self, number: int, model: ModelKey) -> None:
        self._held[number] = self._of_model.get(model, 0)

    def free(self, number: int) -> None:
        """Idempotent."""
        if self._held.pop(number, None) is not None:
            self._freed.set()
            self._freed = asyncio.Event()

    def until_freed(self) -> Coroutine[Any, Any, object]:
        """Return what waits until anything is freed from this call on; at once if there is nothing."""
        freed = self._freed if self._held else asyncio.Event()
        if not self._held:
            freed.set()
        return freed.wait()
