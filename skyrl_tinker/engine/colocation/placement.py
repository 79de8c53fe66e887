"""Placement of trainer and samplers: on separate devices, or in alternating phases on the same ones."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Protocol

from skyrl_tinker.config import Phases
from skyrl_tinker.engine.colocation.phases import PhaseState, PhaseTotals, PhaseView, due_in

TICK_S = 0.001
"""Resolution of timers: a switch that is due within this time is due now."""
_log = logging.getLogger(__name__)
_SWITCHES = {PhaseState.SAMPLING: PhaseState.TO_TRAINING, PhaseState.TRAINING: PhaseState.TO_SAMPLING}


_FREE: AbstractAsyncContextManager[None] = nullcontext()
_AWAKE: AbstractAsyncContextManager[bool] = nullcontext(True)


class Placement:
    """Contexts around every use of trainer or samplers; they wait for the phase of that side.

    On separate devices, as here, there are no phases: both sides work at any time.
    """

    def training(self) -> AbstractAsyncContextManager[None]:
        """Enclose a unit of trainer work. Inside, the trainer's state is on its devices."""
        return _FREE

    def sampling(self) -> AbstractAsyncContextManager[None]:
        """Enclose a sample. A long one pauses during the trainer's phase and then goes on."""
        return _FREE

    def awake(self) -> AbstractAsyncContextManager[None]:
        """Enclose work that must not pause: changes of adapters, weights, replicas. Samplers are awake."""
        return _FREE

    def updating(self) -> AbstractAsyncContextManager[bool]:
        """Enclose the replacement of all weights, which may happen before the samplers' caches wake.

        Yields whether samplers are awake. If not, only their weights are, and they go on after the update.
        """
        return _AWAKE

    @property
    def asleep(self) -> bool:
        """True while samplers pause because it is not their phase."""
        return False

    @property
    def trains(self) -> bool:
        """True while the trainer's contexts open without a wait."""
        return True

    @property
    def totals(self) -> Mapping[PhaseState, PhaseTotals]:
        """Phases and switches so far, without the current one."""
        return {}

    async def run(self, samplers: "Sleeper") -> None:
        """Alternate phases until it is cancelled. Before and after, only the samplers' contexts open."""


SEPARATE = Placement()


class Movable(Protocol):
    """Trainer, whose state moves between device and host. No call raises: the next unit does."""

    async def offload(self) -> None: ...
    async def onload(self) -> None: ...


class Sleeper(Protocol):
    """Samplers, which sleep and wake. No call raises: a replica that fails is ended and frees its memory."""

    async def sleep(self) -> None: ...

    async def wake_weights(self) -> None:
        """Wake the weights alone, so that they can be replaced."""

    async def wake_caches(self) -> None:
        """Wake the rest, and let requests go on."""


@dataclass(slots=True)
class _Side:
    """Users of one side: those inside its contexts and those that wait for its phase."""

    inside: int = 0
    pinned: int = 0  # how many of the contexts inside must not be interrupted
    waiting: dict[object, float] = field(default_factory=dict)  # since when; oldest first
    left_at: float = -math.inf  # when the last context was left
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def idle(self, now: float, since: float) -> float | None:
        return None if self.inside or self.waiting else now - max(self.left_at, since)

    def waited(self, now: float, closed_at: float) -> float | None:
        """Return the longest wait, in seconds; contexts inside wait since their phase ended, `closed_at`."""
        since = [closed_at] if self.inside else []
        since += [next(iter(self.waiting.values()))] if self.waiting else []
        return now - min(since) if since else None


@dataclass(eq=False)
class Colocated(Placement):
    """Placement on shared devices. The first phase is the samplers': trainer offloaded, samplers awake."""

    _trainer: Movable
    _limits: Phases
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._sides = {PhaseState.TRAINING: _Side(), PhaseState.SAMPLING: _Side()}
        self._totals = {state: PhaseTotals() for state in PhaseState}
        self.state = PhaseState.SAMPLING
        self._sides[self.state].opened.set()
        self._updates = 0  # in their context or waiting for it
        self._updatable = asyncio.Event()  # set while the samplers' weights are awake
        self._updatable.set()
        self._since = self._clock()  # when the state began
        self._closed_at = self._since  # when the other side's phase ended
        self._changed = asyncio.Event()

    @property
    def asleep(self) -> bool:
        return self.state is not PhaseState.SAMPLING

    @property
    def trains(self) -> bool:
        return self.state is PhaseState.TRAINING

    @property
    def totals(self) -> Mapping[PhaseState, PhaseTotals]:
        return self._totals

    def training(self) -> AbstractAsyncContextManager[None]:
        return self._phase(PhaseState.TRAINING, pinned=1)

    def sampling(self) -> AbstractAsyncContextManager[None]:
        return self._phase(PhaseState.SAMPLING, pinned=0)

    def awake(self) -> AbstractAsyncContextManager[None]:
        return self._phase(PhaseState.SAMPLING, pinned=1)

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[bool]:
        self._updates += 1
        try:
            async with self._phase(PhaseState.SAMPLING, pinned=1, opened=self._updatable):
                yield self.state is PhaseState.SAMPLING
        finally:
            self._updates -= 1
            self._changed.set()

    async def run(self, samplers: Sleeper) -> None:
        try:
            while True:
                self._switch_if_due()
                self._changed.clear()
                if self.state in self._sides:
                    due_s = self._due_in()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(None if math.isinf(due_s) else due_s):
                            await self._changed.wait()
                else:
                    await self._switch(samplers)
        finally:
            self._sides[PhaseState.TRAINING].opened.clear()
            self._open(PhaseState.SAMPLING)
            self._updatable.set()

    @asynccontextmanager
    async def _phase(
        self, phase: PhaseState, *, pinned: int, opened: asyncio.Event | None = None
    ) -> AsyncIterator[None]:
        side = self._sides[phase]
        await self._enter(side, opened or side.opened)
        side.inside += 1
        side.pinned += pinned
        try:
            yield
        finally:
            side.inside -= 1
            side.pinned -= pinned
            side.left_at = self._clock()
            self._switch_if_due()

    async def _enter(self, side: _Side, opened: asyncio.Event) -> None:
        if opened.is_set():
            return
        ticket = object()
        side.waiting[ticket] = self._clock()
        self._switch_if_due()
        try:
            while not opened.is_set():
                await opened.wait()
        finally:
            del side.waiting[ticket]
            self._changed.set()

    def _switch_if_due(self) -> None:
        """Begin a due switch immediately, not in a task: the next context might pin the phase again."""
        if self._due_in() <= TICK_S:
            self._sides[self.state].opened.clear()
            self._updatable.clear()
            self._closed_at = self._clock()
            self._set_state(_SWITCHES[self.state])
        self._changed.set()

    def _due_in(self) -> float:
        here = self._sides.get(self.state)
        if here is None or here.pinned or here.waiting:  # those that wait here are about to enter
            return math.inf
        there = self._sides[PhaseState.TRAINING if self.state is PhaseState.SAMPLING else PhaseState.SAMPLING]
        now = self._clock()
        view = PhaseView(now - self._since, here.idle(now, self._since), there.waited(now, self._closed_at))
        return due_in(view, self._limits)

    async def _switch(self, samplers: Sleeper) -> None:
        if self.state is PhaseState.TO_TRAINING:
            await samplers.sleep()
            await self._trainer.onload()
            self._open(PhaseState.TRAINING)
        else:
            await self._trainer.offload()
            await samplers.wake_weights()
            await self._let_update()
            await samplers.wake_caches()
            self._open(PhaseState.SAMPLING)
            self._updatable.set()

    async def _let_update(self) -> None:
        """Let waiting updates run before the caches wake: these leave no room, and would be outdated."""
        self._updatable.set()
        while self._updates:
            self._changed.clear()
            await self._changed.wait()
        self._updatable.clear()

    def _open(self, phase: PhaseState) -> None:
        cost = self._clock() - self._since
        self._set_state(phase)
        self._sides[phase].opened.set()
        _log.info("%s from now on, after a switch of %.3f s", phase, cost)

    def _set_state(self, state: PhaseState) -> None:
        now = self._clock()
        totals = self._totals[self.state]
        totals.count += 1
        totals.seconds += now - self._since
        self.state, self._since = state, now


class AwakeLock:
    """Lock that keeps samplers awake while it is held."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._lock = asyncio.Lock()

    @property
    def held(self) -> bool:
        return self._lock.locked()

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[bool]:
        """Hold the lock while all weights are replaced, as the placement's `updating` does."""
        async with self._lock, self._placement.updating() as awake:
            yield awake

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold the lock; waiting for it does not keep the samplers awake."""
        async with self._lock, self._placement.awake():
            yield
