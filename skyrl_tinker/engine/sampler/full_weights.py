"""Full parameters: the samplers hold one set of weights at a time, and requests are grouped by weights."""

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from secrets import token_hex

from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.sampler.inflight_targets import InflightTarget, SampleSource, newest
from skyrl_tinker.engine.sampler.weight_swaps import WeightSwaps


@dataclass(frozen=True, slots=True)
class _State:
    """`group`: the requests that may run; `version` None: the base weights."""

    group: Hashable
    version: WeightVersion | None


_BASE = _State(None, None)
SALT_BYTES = 8
_UNKNOWN = "unknown"  # a group without requests


class FullWeights:
    """None stands for the base weights, which adapters need too.

    Groups get their turn in the order in which they began to wait: once another group waits, newcomers of the
    resident group queue behind it, so that none starves. The requests of an inflight target are one group,
    whose weights are replaced while they run.
    """

    def __init__(self, swaps: WeightSwaps) -> None:
        """Only requests of an inflight target run during a swap, and they go on."""
        self._swaps = swaps
        self._state = _BASE
        self._inside = 0
        self._waiting: OrderedDict[Hashable, int] = OrderedDict()  # group -> number of requests
        self._swapping: asyncio.Task[None] | None = None
        self._coming: WeightVersion | None = None  # while swapping
        self._changed = asyncio.Event()
        self.salt = token_hex(SALT_BYTES)
        """Random text for the resident weights, new with each swap, even back to earlier weights."""

    async def acquire(self, source: SampleSource) -> None:
        """Wait until the samplers serve `source`; they do so until `release`."""
        group = _group(source)
        self._waiting[group] = self._waiting.get(group, 0) + 1
        try:
            while not (self._has_turn(group) and self._state == _state(source)):
                if self._has_turn(group):
                    await self._bring(_state(source))
                else:
                    await self._changed.wait()
            self._inside += 1
        finally:
            self._waiting[group] -= 1
            if not self._waiting[group]:
                del self._waiting[group]
                self._wake()

    def release(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._wake()

    async def offer(self, source: SampleSource) -> None:
        """Load it for an inflight target whose requests run, or on idle samplers; otherwise do nothing."""
        while self._swapping is not None:
            await self._changed.wait()
        idle = not self._inside and not self._waiting
        runs = self._inside and isinstance(source, InflightTarget) and self._state.group == _group(source)
        if (idle or runs) and self._state != _state(source):
            await self._bring(_state(source))

    @property
    def resident(self) -> WeightVersion | None:
        """The version that the samplers serve; None for the base weights, or while it is not known."""
        return self._state.version

    @property
    def swapping(self) -> bool:
        """True while other weights are being sent to the samplers."""
        return self._swapping is not None

    def in_use(self, version: WeightVersion) -> bool:
        """Return whether requests run on it, or it is being sent to the samplers."""
        running = self._inside > 0 and self._state.version == version
        return running or (self._swapping is not None and self._coming == version)

    def drop(self) -> bool:
        """Forget the resident weights if no request runs on them; return whether they are forgotten."""
        if not self._inside:
            self.forget()
        return not self._inside

    def forget(self) -> None:
        """Make the next request load its weights, as the samplers may serve different ones."""
        self._state = _State(_UNKNOWN, None)

    def reset(self) -> None:
        """Assume the base weights, as in fresh samplers."""
        self._state = _BASE

    def _has_turn(self, group: Hashable) -> bool:
        first = next(iter(self._waiting))
        fits = group == self._state.group or self._inside == 0
        return self._swapping is None and group == first and fits

    # Swapping

    async def _bring(self, new: _State) -> None:
        """Complete a swap, even if the request that needs it is cancelled meanwhile."""
        self._coming = new.version
        self._swapping = asyncio.create_task(self._exchange(new))
        self._swapping.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._swapping)

    async def _exchange(self, new: _State) -> None:
        try:
            await self._swaps.swap(new.version)
            self._state = new
        finally:
            self.salt = token_hex(SALT_BYTES)
            self._swapping = None
            self._wake()

    def _wake(self) -> None:
        self._changed.set()  # wakes present waiters, no later ones
        self._changed.clear()


def _group(source: SampleSource) -> Hashable:
    return source.id if isinstance(source, WeightVersion) else source


def _state(source: SampleSource) -> _State:
    return _State(_group(source), newest(source) if source else None)
