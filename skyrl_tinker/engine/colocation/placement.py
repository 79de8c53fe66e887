"""Where trainer and samplers run: on devices of their own, or in turns on the same ones."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Protocol

from skyrl_tinker.config import Settings
from skyrl_tinker.engine.colocation.phases import PhaseLimits, PhaseState, PhaseView, Spent, due_in
from skyrl_tinker.errors import TrainerError

TICK_S = 0.001
"""What is due within this is due: timers are no finer."""
_log = logging.getLogger(__name__)
_SWITCHES = {PhaseState.SAMPLING: PhaseState.TO_TRAINING, PhaseState.TRAINING: PhaseState.TO_SAMPLING}


class Placement(Protocol):
    """Who uses trainer or samplers says so; the contexts wait until that side has its turn.

    TrainerError: the turns are broken for good, and the engine ends.
    """

    def training(self) -> AbstractAsyncContextManager[None]:
        """Around each unit of trainer work. Inside, the trainer's state is on its devices."""
        ...

    def sampling(self) -> AbstractAsyncContextManager[None]:
        """Around each sample. Long ones stand still inside while the trainer has its turn, then go on."""
        ...

    def awake(self) -> AbstractAsyncContextManager[None]:
        """Around what must not stand still half done: adapters, weights, replicas. Inside, vLLM is awake."""
        ...

    @property
    def asleep(self) -> bool:
        """Whether samples stand still because it is not their turn."""
        ...

    @property
    def spent(self) -> Mapping[PhaseState, Spent]:
        """Phases and switches so far, the current one not counted."""
        ...

    async def run(self, samplers: "Sleeper") -> None:
        """Take turns, for ever. Before it, only the samplers' contexts open."""
        ...


class Separate:
    """Both sides work at any time."""

    asleep = False
    spent: Mapping[PhaseState, Spent] = MappingProxyType({})
    _free: AbstractAsyncContextManager[None] = nullcontext()

    def training(self) -> AbstractAsyncContextManager[None]:
        return self._free

    def sampling(self) -> AbstractAsyncContextManager[None]:
        return self._free

    def awake(self) -> AbstractAsyncContextManager[None]:
        return self._free

    async def run(self, samplers: "Sleeper") -> None:
        """Nothing to do."""


SEPARATE = Separate()


class Movable(Protocol):
    """The trainer. TrainerError: broken."""

    async def offload(self) -> None: ...
    async def onload(self) -> None: ...


class Sleeper(Protocol):
    """The samplers. Neither raises: a replica that cannot is ended, and its memory is free."""

    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...


@dataclass(slots=True)
class _Side:
    """Who is here and who would like to be."""

    inside: int = 0
    pinned: int = 0  # of those, who must not be interrupted
    waiting: dict[object, float] = field(default_factory=dict)  # since when; oldest first
    left_at: float = -math.inf  # when somebody last left
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def idle(self, now: float, since: float) -> float | None:
        return None if self.inside or self.waiting else now - max(self.left_at, since)

    def waited(self, now: float, closed_at: float) -> float | None:
        """Who is inside while it is not this side's turn stands still since `closed_at`."""
        since = [closed_at] if self.inside else []
        since += [next(iter(self.waiting.values()))] if self.waiting else []
        return now - min(since) if since else None


class Colocated:
    """The samplers' turn comes first: start with the trainer's state set aside and vLLM awake."""

    def __init__(
        self,
        trainer: Movable,
        limits: PhaseLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._limits = limits
        self._clock = clock
        self._sides = {PhaseState.TRAINING: _Side(), PhaseState.SAMPLING: _Side()}
        self._spent = {state: Spent() for state in PhaseState}
        self._state = PhaseState.SAMPLING
        self._since = clock()  # the state's beginning
        self._closed_at = self._since  # when the other side's turn ended
        self._changed = asyncio.Event()
        self._broken: TrainerError | None = None

    @property
    def state(self) -> PhaseState:
        return self._state

    @property
    def asleep(self) -> bool:
        return self._state is not PhaseState.SAMPLING

    @property
    def spent(self) -> Mapping[PhaseState, Spent]:
        return self._spent

    def training(self) -> AbstractAsyncContextManager[None]:
        return self._turn(PhaseState.TRAINING, pinned=1)

    def sampling(self) -> AbstractAsyncContextManager[None]:
        return self._turn(PhaseState.SAMPLING, pinned=0)

    def awake(self) -> AbstractAsyncContextManager[None]:
        return self._turn(PhaseState.SAMPLING, pinned=1)

    async def run(self, samplers: Sleeper) -> None:
        while True:
            self._consider()
            self._changed.clear()
            if self._state in self._sides:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_finite(self._due_in())):
                        await self._changed.wait()
            elif not await self._switch(samplers):
                return

    @asynccontextmanager
    async def _turn(self, turn: PhaseState, *, pinned: int) -> AsyncIterator[None]:
        side = self._sides[turn]
        await self._enter(side, turn)
        side.inside += 1
        side.pinned += pinned
        try:
            yield
        finally:
            side.inside -= 1
            side.pinned -= pinned
            side.left_at = self._clock()
            self._consider()

    async def _enter(self, side: _Side, turn: PhaseState) -> None:
        if self._state is turn:
            return
        ticket = object()
        side.waiting[ticket] = self._clock()
        self._consider()
        try:
            while self._state is not turn:
                if self._broken is not None:
                    raise self._broken
                await side.opened.wait()
        finally:
            del side.waiting[ticket]
            self._changed.set()

    def _consider(self) -> None:
        """Begin the switch if it is due. At once, not in a task: the next one might pin the phase again."""
        if self._due_in() <= TICK_S:
            self._sides[self._state].opened.clear()
            self._closed_at = self._clock()
            self._become(_SWITCHES[self._state])
        self._changed.set()

    def _due_in(self) -> float:
        here = self._sides.get(self._state)
        if here is None or here.pinned or here.waiting:  # who waits here is on the way in
            return math.inf
        there = self._sides[
            PhaseState.TRAINING if self._state is PhaseState.SAMPLING else PhaseState.SAMPLING
        ]
        now = self._clock()
        view = PhaseView(now - self._since, here.idle(now, self._since), there.waited(now, self._closed_at))
        return due_in(view, self._limits)

    async def _switch(self, samplers: Sleeper) -> bool:
        """False: it failed, and a unit that waited for it tells its clients and ends the engine."""
        try:
            if self._state is PhaseState.TO_TRAINING:
                await samplers.sleep()
                await self._trainer.onload()
                self._open(PhaseState.TRAINING)
            else:
                await self._trainer.offload()
                await samplers.wake()
                self._open(PhaseState.SAMPLING)
        except TrainerError as error:
            self._fail(error)
            if not self._sides[PhaseState.TRAINING].waiting:
                raise
            return False
        return True

    def _open(self, turn: PhaseState) -> None:
        cost = self._clock() - self._since
        self._become(turn)
        self._sides[turn].opened.set()
        _log.info("%s from here on, after a switch of %.3f s", turn, cost)

    def _fail(self, error: TrainerError) -> None:
        self._broken = error
        self._become(PhaseState.BROKEN)
        for side in self._sides.values():
            side.opened.set()

    def _become(self, state: PhaseState) -> None:
        now = self._clock()
        spent = self._spent[self._state]
        spent.count += 1
        spent.seconds += now - self._since
        self._state, self._since = state, now


class AwakeLock:
    """A lock whose holder finds vLLM awake, and awake it stays."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._lock = asyncio.Lock()
        self._awake: AbstractAsyncContextManager[None] | None = None

    async def __aenter__(self) -> None:
        """The lock first: those who wait for it must not keep the samplers awake."""
        await self._lock.acquire()
        awake = self._placement.awake()
        try:
            await awake.__aenter__()
        except BaseException:  # also who is cancelled while waiting leaves the lock to the others
            self._lock.release()
            raise
        self._awake = awake

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        awake, self._awake = self._awake, None
        assert awake is not None
        try:
            await awake.__aexit__(kind, error, trace)
        finally:
            self._lock.release()


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def make_placement(settings: Settings, trainer: Movable) -> Placement:
    if settings.placement == "separate":
        return SEPARATE
    return Colocated(trainer, PhaseLimits(settings.phase_min_s, settings.phase_max_s))
