"""Unnamed weights for sampling: their number, place and lifetime."""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import ModelKey, VersionId
from skyrl_tinker.domain.units import GB
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.store import weight_versions
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import in_disk_thread, in_transfer_thread
from skyrl_tinker.system.turns import Turns

RECENT_S = 60.0
"""Seconds after their last sample during which weights count as still sampled."""
SHARE = 0.25
"""Default share of the home's disk for all versions together."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class EphemeralVersions:
    """Unnamed weights. `samplers`: of all base models that are sampled; at most one samples a version.

    `forget_sources`: called after a version was dropped.
    """

    _store: Store
    _samplers: Sequence[Samplers]
    _forget_sources: Callable[[WeightVersion], None]
    _spill: TmpfsSpill
    _settings: Settings

    def __post_init__(self) -> None:
        self._turns = Turns()
        self._began_at = time.monotonic()
        self._moved: set[VersionId] = set()  # to disk, of those that are kept

    async def sweep(self) -> None:
        """Drop unused versions, then the oldest above the cap, and move others to disk."""
        kept_bytes, unused = await self._list_unused()
        for version in unused:
            await self._drop(version)
        if kept_bytes > (cap := await in_disk_thread(self._cap)):
            await self._enforce_cap(cap)
        await self._move_oldest()

    async def retire(self, version: WeightVersion) -> bool:
        """Drop a version from the samplers and the store; returns False while it is in use.

        Only then may its files be removed: a server that must read them again would die without them.
        """
        if self._in_use(version):
            return False
        for samplers in self._samplers:
            await samplers.unload(version)
        if self._in_use(version):  # a sample began while the unload waited
            return False
        await self._store.write(lambda conn: weight_versions.mark_dropped(conn, version.id))
        self._forget_sources(version)  # later requests get the answer that it is gone
        if self._in_use(version):  # a sample began while the store wrote
            await self._store.write(lambda conn: weight_versions.keep(conn, version.id))
            return False
        return True

    def _in_use(self, version: WeightVersion) -> bool:
        return any(samplers.in_use(version) for samplers in self._samplers)

    def _idle_s(self, version: WeightVersion) -> float:
        """Return the seconds since any samplers published or sampled a version, else since the start."""
        began_s = time.monotonic() - self._began_at
        return min((samplers.idle_s(version) for samplers in self._samplers), default=began_s)

    async def keep_sampled(self, model: ModelKey) -> None:
        """Copy to disk the versions that clients of this model sample: the newest one, and those in use.

        Call it before a snapshot is recorded: a replay from it could not make them again after a reboot.
        Raises OSError: the disk is full.
        """
        find = partial(weight_versions.list_ephemeral_versions, model_key=model)
        versions = await persistently(self._store.fetch, find)
        old = {version for version in versions[:-1] if self._idle_s(version) >= RECENT_S}
        awaited = set[VersionId]()
        if old:  # else it need not be known which versions all waiting samples want
            awaited = await persistently(self._store.fetch, weight_versions.list_awaited_versions)
        for version in versions:
            sampled = version not in old or self._idle_s(version) < RECENT_S  # perhaps meanwhile
            if sampled or version.id in awaited:
                await self._in_turn(self._spill.keep, version)

    async def _list_unused(self) -> tuple[int, list[WeightVersion]]:
        """Return the bytes of all versions, and those that nobody samples any more."""
        keep, idle_s = self._settings.ephemeral.keep, self._settings.ephemeral.idle_s
        before = self._store.now() - idle_s

        def op(conn: Connection) -> tuple[int, list[WeightVersion], list[WeightVersion]]:
            usage = weight_versions.ephemeral_usage(conn)
            surplus = weight_versions.list_surplus_versions(conn, usage, keep, created_before=before)
            unused = weight_versions.list_droppable_versions(conn, usage)
            return sum(each.size_bytes for each in usage), unused, surplus

        kept_bytes, unused, surplus = await self._store.fetch(op)
        idle = [version for version in surplus if self._idle_s(version) > idle_s]
        return kept_bytes, list(dict.fromkeys(unused + idle))

    async def _drop(self, version: WeightVersion) -> bool:
        if not await self.retire(version):
            return False
        await self._in_turn(self._spill.remove, version)
        return True

    async def _in_turn(self, work: Callable[[WeightVersion], T], version: WeightVersion) -> T:
        """Run work of the spill on a version, after earlier work on the same version."""
        return await self._turns.run(version.id, partial(in_transfer_thread, work, version))

    async def _enforce_cap(self, cap: int) -> None:
        """Drop versions, oldest first, until all are below the cap; the newest of each model stays."""

        def op(conn: Connection) -> tuple[list[WeightVersion], dict[VersionId, int]]:
            usage = weight_versions.ephemeral_usage(conn)
            surplus = weight_versions.list_surplus_versions(conn, usage, 1)
            return surplus, weight_versions.ephemeral_sizes(conn)

        versions, sizes = await self._store.fetch(op)
        excess = sum(sizes.values()) - cap
        for version in versions:
            if excess <= 0:
                return
            size = sizes.get(version.id, 0)
            if size and await self._drop(version):
                _log.warning("%s was dropped: unnamed weights take more than ephemeral.gb", version.name)
                excess -= size

    def _cap(self) -> int:
        """Return the bytes that all versions may take."""
        if self._settings.ephemeral.gb is not None:
            return int(self._settings.ephemeral.gb * GB)
        return int(SHARE * shutil.disk_usage(self._settings.root).total)

    async def _move_oldest(self) -> None:
        if not await in_disk_thread(self._spill.low):
            return
        kept = await self._store.fetch(weight_versions.list_ephemeral_versions)
        self._moved.intersection_update(version.id for version in kept)
        for version in kept[:-1]:  # the newest is about to be sampled
            if version.id in self._moved:  # else each sweep would look at the files of all
                continue
            if not await in_disk_thread(self._spill.low):
                return
            with suppress(FileNotFoundError):  # gone with a reboot; a replay may make it again
                if await self._in_turn(self._spill.move, version):
                    self._moved.add(version.id)
