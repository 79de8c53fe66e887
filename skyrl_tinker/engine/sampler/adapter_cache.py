"""LoRA adapters on the samplers: loaded on demand, the least recently used evicted, loaded again."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from skyrl_tinker.domain.ids import VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.inflight_targets import InflightTarget, newest
from skyrl_tinker.engine.sampler.version_files import require_files
from skyrl_tinker.errors import SamplerError, UserError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient

_log = logging.getLogger(__name__)
TURN_S = 1.0
"""Least seconds for which a version keeps its place while others wait for one."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Numbers of adapters that a sampler keeps in memory, and that it takes into one batch; 0: none."""

    loaded: int
    running: int


@dataclass(eq=False, slots=True)
class _Turn:
    """A version's place among those that run. `ends`: when it must yield to others, by the loop's clock."""

    version: WeightVersion
    ends: float
    users: int = 0
    interrupted: bool = False


@dataclass(eq=False, slots=True)
class _Wait:
    """Requests that wait for one version. `parked`: how many of them await `changed`.

    `changed` is set when they may go on, or must end a turn. `loading`: one of them loads the version, or
    waits for its turn to do so.
    """

    requests: int = 0
    parked: int = 0
    loading: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class AdapterCache:
    """Cache of as many adapters as each sampler keeps in memory. An adapter in use is never evicted.

    - A version runs only with a place in the samplers' batch: a sampler would pass over requests of further
      adapters for as long as requests of the first ones arrive.
    - Versions wait for a place in turn. For each waiting one, the version that has had its place for longest
      takes no more requests once its turn is over, and its requests are interrupted if they can go on later
      (SampleCall), so that none starves.
    - While a version to be loaded waits for another change of the samplers, which may take minutes, loaded
      versions use its place; once it is loaded, they leave it one as their turns end.
    - All replicas share the places, as a router chooses among them.
    - A change costs as much as there are adapters loaded, however many requests wait.
    """

    def __init__(self, fleet: Fleet, limits: AdapterLimits) -> None:
        self._fleet = fleet
        self._limits = limits
        self._loaded: OrderedDict[VersionId, WeightVersion] = OrderedDict()  # least recently used first
        self._turns: dict[VersionId, _Turn] = {}  # oldest first
        self._waiting: OrderedDict[VersionId, _Wait] = OrderedDict()
        self._blocked: set[VersionId] = set()  # wait for another change of the samplers

    def require_taken(self) -> None:
        """Raise UserError if the samplers take no adapters."""
        if not self._limits.running:
            raise UserError("no adapter can be sampled: this base model's setting max_lora_rank is 0")

    async def acquire(self, source: WeightVersion | InflightTarget) -> WeightVersion:
        """Return a version once its adapter is loaded and has a place; both stay so until `release`.

        For a target it is the newest version at that moment; `Samplers.announce` interrupts later requests.
        Raises StateLostError or SamplerError if it cannot be loaded.
        """
        while True:
            version = newest(source)
            if not self._is_open(version):
                await self._wait_for(version)
            turn = self._turns.get(version.id)
            if turn is None:
                turn = self._turns[version.id] = _Turn(version, _now() + TURN_S)
                self._wake()  # the next in line has to end this turn
            turn.users += 1
            turn.interrupted = False
            self._loaded.move_to_end(version.id)
            if version == newest(source):
                return version
            self.release(version)

    def release(self, version: WeightVersion) -> None:
        turn = self._turns[version.id]
        turn.users -= 1
        if not turn.users:
            del self._turns[version.id]
            self._wake()

    def in_use(self, version: WeightVersion) -> bool:
        """Return whether requests hold the version or wait for it."""
        return version.id in self._turns or version.id in self._waiting

    def loaded(self) -> list[WeightVersion]:
        """Return the versions that every member has, least recently used first."""
        return list(self._loaded.values())

    async def load(self, version: WeightVersion) -> None:
        """Load a version, unless all loaded ones are in use or a change is in progress: it may take minutes.

        In these cases its first request loads it. Raises UserError as `require_taken` does.
        """
        self.require_taken()
        if self._fleet.changing.held:
            return
        async with self._fleet.changing.hold():
            if version.id not in self._loaded and not self._waiting and self._has_room():
                await self._load(version)

    async def unload(self, version: WeightVersion) -> None:
        """Unload a version that no client samples any more, unless a request has begun with it meanwhile."""
        async with self._fleet.changing.hold():
            if version.id not in self._turns:
                await self._evict(version.id)
                self._wake()

    def forget(self, version: WeightVersion) -> None:
        """Mark a version as not loaded, because a sampler lost it; the others tolerate a second load."""
        self._loaded.pop(version.id, None)
        self._wake()

    def reset(self) -> None:
        """Mark all as not loaded, as in fresh samplers."""
        self._loaded.clear()
        self._wake()

    async def equip(self, newcomer: RemoteInferenceClient) -> None:
        """Load the adapters of the other replicas; called with `changing` held.

        An adapter that is gone or refused is forgotten: it must not keep the newcomer out.
        """
        for version in list(self._loaded.values()):
            try:
                await newcomer.control.load_adapter(version.name, version.directory)
            except SamplerError:
                await newcomer.control.health()  # raises SamplerError if the newcomer is broken
                self.forget(version)

    async def _wait_for(self, version: WeightVersion) -> None:
        wait = self._waiting.setdefault(version.id, _Wait())
        wait.requests += 1
        try:
            while not await self._load_in_turn(version, wait):
                await self._await_change(wait)
        finally:
            wait.requests -= 1
            if not wait.requests:
                del self._waiting[version.id]
                self._wake()

    async def _load_in_turn(self, version: WeightVersion, wait: _Wait) -> bool:
        """Load a version if it may run and no other request loads it; return whether it takes requests."""
        if version.id not in self._loaded and self._may_run(version) and not wait.loading:
            wait.loading = True
            try:
                self._block(version)
                async with self._fleet.changing.hold():
                    self._unblock(version)
                    if version.id not in self._loaded and self._has_room():
                        await self._load(version)
            finally:
                self._unblock(version)
                wait.loading = False
                self._pulse([wait])  # after a failure another request tries it
        return self._is_open(version)

    def _block(self, version: WeightVersion) -> None:
        """Lend the version's place if its load has to wait, unless that might prevent the load."""
        if self._fleet.changing.held and self._limits.loaded > self._limits.running:
            self._blocked.add(version.id)
            self._wake()

    def _unblock(self, version: WeightVersion) -> None:
        if version.id in self._blocked:
            self._blocked.discard(version.id)
            self._wake()

    async def _await_change(self, wait: _Wait) -> None:
        """Return after a change; meanwhile, interrupt a turn that ends and that others wait for."""
        ending = self._ending()
        wait.parked += 1
        try:
            async with asyncio.timeout_at(None if ending is None else ending.ends):
                await wait.changed.wait()
        except TimeoutError:
            late = True
        else:
            late = False
        finally:
            wait.parked -= 1
        if late and ending is not None and ending is self._ending():
            await self._interrupt(ending)

    async def _interrupt(self, turn: _Turn) -> None:
        turn.interrupted = True  # by this request, or by another one if this one leaves
        self._pulse(self._waiting.values())  # another request ends the next turn meanwhile
        try:
            async with self._fleet.placement.awake():
                await self._fleet.client.control.interrupt(turn.version.name)
        except SamplerError as error:  # they end on their own
            _log.warning("requests of %s could not be interrupted: %s", turn.version.name, error)
        except BaseException:  # cancelled, or a broken placement: another request does it
            turn.interrupted = False
            self._pulse(self._waiting.values())
            raise

    def _is_open(self, version: WeightVersion) -> bool:
        return version.id in self._loaded and self._may_run(version)

    def _may_run(self, version: WeightVersion) -> bool:
        """Return whether there is a place for the version's requests."""
        turn = self._turns.get(version.id)
        if turn is not None:
            return _now() < turn.ends or turn not in self._leaving()
        if version.id in self._waiting:
            return version.id in islice(self._line(), self._free())
        return self._line_length() < self._free()

    def _free(self) -> int:
        return max(0, self._limits.running - len(self._turns))

    def _line(self) -> Iterator[VersionId]:
        """Yield the versions that wait for a place, in turn; while one is blocked, only the loaded ones."""
        versions = self._loaded if self._blocked else self._waiting
        return (each for each in versions if each in self._waiting and each not in self._turns)

    def _line_length(self) -> int:
        if self._blocked:
            return sum(1 for _ in self._line())
        return len(self._waiting) - sum(version in self._waiting for version in self._turns)

    def _leaving(self) -> list[_Turn]:
        """List the turns that others wait for, oldest first."""
        count = len(self._turns) + self._line_length() - self._limits.running
        return list(islice(self._turns.values(), max(0, count)))

    def _ending(self) -> _Turn | None:
        """Return the turn that is to be interrupted next."""
        return next((turn for turn in self._leaving() if not turn.interrupted), None)

    def _has_room(self) -> bool:
        return len(self._loaded) < self._limits.loaded or self._idle() is not None

    def _idle(self) -> VersionId | None:
        """Return the version to evict: the least recently used, preferably one without waiting requests."""
        idle = (version for version in self._loaded if version not in self._turns)
        return min(idle, key=lambda version: version in self._waiting, default=None)

    async def _load(self, version: WeightVersion) -> None:
        await asyncio.to_thread(require_files, version)
        while len(self._loaded) >= self._limits.loaded and (idle := self._idle()) is not None:
            await self._evict(idle)
        await self._fleet.client.control.load_adapter(version.name, version.directory)
        self._loaded[version.id] = version
        self._wake()

    async def _evict(self, version: VersionId) -> None:
        """Unload a version; best effort, as a name left on a sampler is never used again."""
        loaded = self._loaded.pop(version, None)
        if loaded is not None:
            with suppress(SamplerError):
                await self._fleet.client.control.unload_adapter(loaded.name)

    def _wake(self) -> None:
        """Wake the versions that may have a place now, and the next one, which ends turns."""
        line, free = self._line(), self._free()
        first = [self._waiting[version] for version in islice(line, free)]
        behind = (wait for version in line if (wait := self._waiting[version]).parked)
        again = [self._waiting[version] for version in self._turns if version in self._waiting]
        self._pulse((*first, *islice(behind, 1), *again))

    def _pulse(self, waits: Iterable[_Wait]) -> None:
        for wait in waits:
            wait.changed.set()  # wakes present waiters, no later ones
            wait.changed.clear()


def _now() -> float:
    return asyncio.get_running_loop().time()
