"""LoRA adapters on the samplers: loaded on demand, the least recently used evicted, loaded again."""

import asyncio
import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
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
"""How long a version has its place at least, while others wait for one."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Numbers of adapters that a sampler keeps in memory, and takes into one batch; 0: none at all."""

    loaded: int
    running: int


@dataclass(eq=False, slots=True)
class _Turn:
    """A version's place among those that run. `ends`: when others may have it, by the loop's clock."""

    version: WeightVersion
    ends: float
    users: int = 0
    interrupted: bool = False


class AdapterCache:
    """Cache of as many adapters as each sampler keeps in memory, which never evicts one in use.

    Those that run at once have a place in its batch: requests of any other would be passed over for as
    long as those of the first ones come. Versions wait for a place in turn. For each that waits, the version
    that has had its place for longest takes no more requests once its turn is over, and those that it has are
    interrupted if they can go on later (SampleCall), so that none starves. All replicas share the places, as
    a router chooses among them.
    """

    def __init__(self, fleet: Fleet, limits: AdapterLimits) -> None:
        self._fleet = fleet
        self._limits = limits
        self._loaded: OrderedDict[VersionId, WeightVersion] = OrderedDict()  # least recently used first
        self._turns: dict[VersionId, _Turn] = {}  # oldest first
        self._waiting: OrderedDict[VersionId, int] = OrderedDict()  # how many requests wait for each
        self._changed = asyncio.Event()

    def require_taken(self) -> None:
        """Raise UserError where the samplers take no adapters."""
        if not self._limits.running:
            raise UserError("no adapter can be sampled: the server's setting max_lora_rank is 0")

    async def acquire(self, source: WeightVersion | InflightTarget) -> WeightVersion:
        """Return the version whose adapter is loaded and has a place, and stays so until `release`.

        Of a target it is the newest when this returns; `Samplers.announce` interrupts what runs from then on.
        StateLostError, SamplerError if it cannot be loaded.
        """
        while True:
            version = newest(source)
            if not self._is_open(version):
                await self._wait_for(version)
            turn = self._turns.setdefault(version.id, _Turn(version, _now() + TURN_S))
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
        """Return whether requests hold it or wait for it."""
        return version.id in self._turns or version.id in self._waiting

    def loaded(self) -> list[WeightVersion]:
        """Return the versions that every member has, least recently used first."""
        return list(self._loaded.values())

    async def load(self, version: WeightVersion) -> None:
        """Load it, unless all that are loaded are in use or a change is under way, which may take minutes.

        Then it comes with its first request. Raises UserError as `require_taken` does.
        """
        self.require_taken()
        if self._fleet.changing.held:
            return
        async with self._fleet.changing:
            if version.id not in self._loaded and not self._waiting and self._has_room():
                await self._load(version)

    async def unload(self, version: WeightVersion) -> None:
        """Unload a version that no client samples any more. One that a request began with meanwhile stays."""
        async with self._fleet.changing:
            if version.id not in self._turns:
                await self._evict(version.id)
                self._wake()

    def forget(self, version: WeightVersion) -> None:
        """Mark it as not loaded, because a sampler lost it; loading it again does no harm to the others."""
        self._loaded.pop(version.id, None)
        self._wake()

    async def equip(self, newcomer: RemoteInferenceClient) -> None:
        """Load what the other replicas have; called with `changing` held.

        An adapter that is gone or refused is forgotten: it must not keep the newcomer away.
        """
        for version in list(self._loaded.values()):
            try:
                await newcomer.control.load_adapter(version.name, version.directory)
            except SamplerError:
                await newcomer.control.health()  # SamplerError: it is the newcomer that is broken
                self.forget(version)

    async def _wait_for(self, version: WeightVersion) -> None:
        self._waiting[version.id] = self._waiting.get(version.id, 0) + 1
        try:
            while not await self._load_in_turn(version):
                await self._await_change()
        finally:
            self._waiting[version.id] -= 1
            if not self._waiting[version.id]:
                del self._waiting[version.id]
                self._wake()

    async def _load_in_turn(self, version: WeightVersion) -> bool:
        """Load it if it may run; return whether it takes requests."""
        if version.id not in self._loaded and self._may_run(version):
            async with self._fleet.changing:
                if version.id not in self._loaded and self._may_run(version):
                    await self._load(version)
        return self._is_open(version)

    async def _await_change(self) -> None:
        """Return after a change. Meanwhile a turn may end that others wait for."""
        ending = self._ending()
        try:
            async with asyncio.timeout_at(None if ending is None else ending.ends):
                await self._changed.wait()
        except TimeoutError:
            if ending is not None and ending is self._ending():
                await self._interrupt(ending)

    async def _interrupt(self, turn: _Turn) -> None:
        turn.interrupted = True  # by this request, and again by another one if this one leaves
        try:
            async with self._fleet.placement.awake():
                await self._fleet.client.control.interrupt(turn.version.name)
        except SamplerError as error:  # they end without it
            _log.warning("requests of %s could not be interrupted: %s", turn.version.name, error)
        except BaseException:
            turn.interrupted = False
            raise

    def _is_open(self, version: WeightVersion) -> bool:
        return version.id in self._loaded and self._may_run(version)

    def _may_run(self, version: WeightVersion) -> bool:
        """Return whether its requests may begin, as far as places go."""
        turn = self._turns.get(version.id)
        if turn is not None:
            return _now() < turn.ends or turn not in self._leaving()
        line = self._line()
        before = line.index(version.id) if version.id in line else len(line)
        return len(self._turns) + before < self._limits.running

    def _line(self) -> list[VersionId]:
        """List the versions that wait for a place, in turn."""
        return [version for version in self._waiting if version not in self._turns]

    def _leaving(self) -> list[_Turn]:
        """List the turns that others wait for, oldest first."""
        count = len(self._turns) + len(self._line()) - self._limits.running
        return list(islice(self._turns.values(), max(0, count)))

    def _ending(self) -> _Turn | None:
        """Return the turn that is to be interrupted next."""
        return next((turn for turn in self._leaving() if not turn.interrupted), None)

    def _has_room(self) -> bool:
        return len(self._loaded) < self._limits.loaded or self._idle() is not None

    def _idle(self) -> VersionId | None:
        """Return the one to evict: the least recently used, rather one that nobody waits for."""
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
        """Unload it; best effort, as a name that stays behind on a sampler is never used again."""
        loaded = self._loaded.pop(version, None)
        if loaded is not None:
            with suppress(SamplerError):
                await self._fleet.client.control.unload_adapter(loaded.name)

    def _wake(self) -> None:
        self._changed.set()  # all that wait now, and none later
        self._changed.clear()


def _now() -> float:
    return asyncio.get_running_loop().time()
