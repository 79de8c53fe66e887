"""Full parameters: the samplers hold one set of weights at a time, and requests run grouped by it."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from skyrl_tinker.wire.ids import VersionId
from skyrl_tinker.wire.values import WeightVersion

Swap = Callable[[WeightVersion | None], Awaitable[None]]


class Residency:
    """None stands for the base weights, under which adapters run too.

    Groups get their turn in the order in which they began to wait: once another group waits, newcomers of the
    resident one queue up behind it, so that nobody starves.
    """

    def __init__(self, swap: Swap) -> None:
        """`swap` brings in the weights while no request is in flight; the old ones stay when it raises."""
        self._swap = swap
        self._resident: VersionId | None = None
        self._inside = 0
        self._waiting: OrderedDict[VersionId | None, int] = OrderedDict()  # group -> how many
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, version: WeightVersion | None) -> AsyncIterator[None]:
        """Inside, the samplers serve this version."""
        await self._enter(version)
        try:
            yield
        finally:
            await self._leave()

    def forget(self) -> None:
        """The samplers were started anew, with the base weights."""
        self._resident = None

    async def _enter(self, version: WeightVersion | None) -> None:
        group = version.id if version else None
        async with self._changed:
            self._waiting[group] = self._waiting.get(group, 0) + 1
            try:
                await self._changed.wait_for(lambda: self._may_enter(group))
                if group != self._resident:
                    await self._swap(version)
                    self._resident = group
                    self._changed.notify_all()
                self._inside += 1
            finally:
                self._stop_waiting(group)

    def _may_enter(self, group: VersionId | None) -> bool:
        first = next(iter(self._waiting))
        return group == first and (group == self._resident or self._inside == 0)

    def _stop_waiting(self, group: VersionId | None) -> None:
        self._waiting[group] -= 1
        if not self._waiting[group]:
            del self._waiting[group]
            self._changed.notify_all()

    async def _leave(self) -> None:
        async with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()
