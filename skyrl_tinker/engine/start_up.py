"""Start-up of the engine: trainer and samplers of each base model, their check, recovery; reports how far."""

import asyncio
import logging
from collections.abc import Awaitable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.values import BaseModelFacts, Gpu, WeightVersion
from skyrl_tinker.engine.colocation.placement import SEPARATE, Placement, make_placement
from skyrl_tinker.engine.compose import (
    BaseRuntime,
    Environment,
    log_suffix,
    make_samplers,
    make_tmpfs_spill,
    sampler_spec,
    trainer_spec,
)
from skyrl_tinker.engine.outbox import persistently, read_persistently
from skyrl_tinker.engine.parity import startup_check
from skyrl_tinker.engine.parity.probe import allowed_gap
from skyrl_tinker.engine.recovery import leftovers, parking
from skyrl_tinker.engine.sampler.launch import ToEnd, assemble, launch_servers, sampler_gpus
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.errors import SamplerError, StartupError, StorageError
from skyrl_tinker.inference.servers.external_servers import ExternalServers
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.storage.checkpoint_storage import Storage, open_storage
from skyrl_tinker.store import checkpoint_records, sampling_sessions, server_state
from skyrl_tinker.store.database.group_commit import Op, T
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import TRANSFER_THREADS, in_disk_thread
from skyrl_tinker.training.trainer_group import TrainerGroup

_log = logging.getLogger(__name__)


async def read_bases(store: Store) -> Bases:
    bases = await store.read(server_state.get_bases)
    if bases is None:
        raise StartupError("the store names no base model: start the engine with `skyrl-tinker serve`")
    return bases


class StartUp:
    """Brings up all base models; appends the shutdowns of their trainers and samplers to `shutdowns`."""

    def __init__(self, env: Environment, bases: Bases, shutdowns: ToEnd) -> None:
        self._env = env
        self._directories = env.directories
        self._bases = bases
        self._progress = Progress(env.status, "clean-up")
        storage = open_storage(env.settings.checkpoint_root, env.settings.checkpoint_url)
        several = len(bases.all) > 1
        self._started = [
            BaseStartUp(env, facts, number, storage, shutdowns, self._progress, several=several)
            for number, facts in enumerate(bases.all)
        ]

    async def bring_up(self) -> list[BaseRuntime]:
        """Start trainers and samplers concurrently, and tidy up meanwhile.

        Raises StartupError if their logprobs differ too much.
        """
        settings = self._env.settings
        if settings.device == "cuda":
            samplers = sum(sampler_gpus(settings.for_base(facts.name)) for facts in self._bases.all)
            self._env.ray.require_gpus(settings.all_trainer_ranks, samplers)
        await self._progress.report()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._progress.during("clean-up", self.tidy_up()))
            for base in self._started:
                tasks.create_task(base.start())
        return [await base.complete() for base in self._started]

    async def tidy_up(self) -> None:
        """Remove the incomplete files of an earlier engine.

        Also restore the unnamed weights that were kept for clients, and park models of other base models.
        Waits while the database fails, as on a full disk.
        """
        root, ephemeral = self._directories.checkpoint_root, self._directories.ephemeral_dir
        partial_in = chain((ephemeral, root), root.glob("*/*"), self._directories.snapshot_dir.glob("*"))
        await in_disk_thread(leftovers.sweep_partial, partial_in)
        saves = await in_disk_thread(leftovers.list_saves, root)
        await in_disk_thread(
            leftovers.remove, await self._write(partial(leftovers.list_abandoned, saves=saves))
        )
        directories = await read_persistently(self._env.store, checkpoint_records.list_directories)
        recorded = [directory for directory, removed in directories.items() if not removed]
        await in_disk_thread(leftovers.sweep_unrecorded, root, recorded)
        versions = await self._write(partial(_settle_versions, ephemeral=ephemeral))
        spill = make_tmpfs_spill(self._env.settings)
        await in_disk_thread(spill.sweep, {version.name for version in versions})
        remaining = iter(versions)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(TRANSFER_THREADS):
                tasks.create_task(_restore(remaining, spill))
        fingerprints = {
            facts.name: await in_disk_thread(parking.fingerprint, Path(facts.directory))
            for facts in self._bases.all
            if facts.trainable
        }
        sort = partial(parking.sort_models, fingerprints=fingerprints)
        if parked := await self._write(sort):
            _log.warning("%d models wait, parked, until their base models are served again", parked)

    async def _write(self, op: Op[T]) -> T:
        return await persistently(lambda: self._env.store.write(op))


class Progress:
    """Parts that a start waits for, in the engine's status."""

    def __init__(self, status: EngineStatus, *parts: str) -> None:
        self._status = status
        self.waiting_for = {*parts}

    async def during(self, part: str, ready: Awaitable[None]) -> None:
        """Wait for a part."""
        await ready
        _log.info("%s: ready", part)
        self.waiting_for.discard(part)
        await self.report()

    async def report(self) -> None:
        parts = ", ".join(sorted(self.waiting_for)) or "the comparison of trainer and sampler"
        await persistently(lambda: self._status.report("starting", f"waiting for {parts}"))


class BaseStartUp:
    """Brings up one base model. `number`: its place among all; the logs of its samplers are named by it."""

    def __init__(
        self,
        env: Environment,
        facts: BaseModelFacts,
        number: int,
        storage: Storage,
        shutdowns: ToEnd,
        progress: Progress,
        *,
        several: bool,
    ) -> None:
        """`storage`: of checkpoints. `several`: there are other base models."""
        self._env = env
        self._settings = env.settings.for_base(facts.name)
        self._facts = facts
        self._number = number
        self._storage = storage
        self._shutdowns = shutdowns
        self._progress = progress
        whose = f" of {facts.name}" if several else ""
        self._sampler, self._part = f"sampler{whose}", f"trainer{whose}"
        progress.waiting_for |= {self._sampler, *([self._part] if facts.trainable else [])}
        self._trainer: TrainerGroup | None = None
        self._probed: startup_check.Probe | None = None
        self._placement: Placement = SEPARATE
        self._servers: ServerGroup | ExternalServers

    async def start(self) -> None:
        """Start trainer and samplers, and wait for them."""
        shared: tuple[Gpu, ...] = ()
        async with asyncio.TaskGroup() as tasks:
            if self._facts.trainable:
                trainer = self._launch_trainer()
                started = tasks.create_task(self._progress.during(self._part, self._start_trainer(trainer)))
                shared = await self._shared_gpus(trainer, started)
            spec = sampler_spec(self._settings, self._env.directories, self._facts, shared, self._number)
            self._servers = launch_servers(self._settings, spec, self._shutdowns)
            tasks.create_task(self._progress.during(self._sampler, self._await_servers()))

    async def _await_servers(self) -> None:
        try:
            await self._servers.ready()
        except SamplerError as error:
            raise SamplerError(f"{self._sampler}: {error}") from error

    async def complete(self) -> BaseRuntime:
        """Put together what has started, and check it."""
        env, settings, facts = self._env, self._settings, self._facts
        fleet = await assemble(
            *(settings, self._servers, self._placement, facts.directory, env.directories.log_dir),
            *(self._shutdowns, env.store.now, log_suffix(self._number)),
        )
        samplers = make_samplers(
            settings, facts, self._trainer, fleet, env.metrics, self._storage, env.ray.address
        )
        if settings.external_urls:
            await fleet.adopt(samplers.equip)
        if settings.parity.canary:
            await self._check(samplers)
        return BaseRuntime(settings, facts, self._trainer, fleet, samplers, self._placement)

    def _launch_trainer(self) -> TrainerGroup:
        spec = trainer_spec(self._settings, self._env.directories, self._facts)
        trainer = self._trainer = TrainerGroup.launch(spec, self._env.ray.require_alive)
        self._shutdowns.append(trainer.shutdown)
        self._placement = make_placement(self._settings, trainer)
        return trainer

    async def _start_trainer(self, trainer: TrainerGroup) -> None:
        await trainer.ready()
        directories = self._env.directories
        await trainer.look_for_shared([directories.checkpoint_root, directories.snapshot_dir])
        if self._settings.parity.canary:
            self._probed = await startup_check.probe(trainer, self._facts)
        if self._settings.colocated:
            await trainer.offload()  # the first phase is the samplers'

    async def _shared_gpus(self, trainer: TrainerGroup, started: Awaitable[Any]) -> tuple[Gpu, ...]:
        """Return the trainer's GPUs once it is offloaded: a sampler takes its memory at its start."""
        if not self._settings.colocated:
            return ()
        await started
        return await trainer.gpus()

    async def _check(self, samplers: Samplers) -> None:
        """Compare trainer and samplers, without a trainer two ways of the samplers."""
        if self._probed is None:
            gap = await startup_check.compare_own(samplers)
            _log.info("logprobs of the %s, as drawn and as scored, differ by at most: %s", self._sampler, gap)
            startup_check.require_agreement(gap, allowed_gap(self._settings), self._sampler)
        else:
            directory = self._env.directories.ephemeral_dir / f"canary{log_suffix(self._number)}"
            gap = await startup_check.compare(self._probed, samplers, directory)
            _log.info("logprobs of %s and %s differ by at most: %s", self._part, self._sampler, gap)
            startup_check.require_agreement(gap, allowed_gap(self._settings))


async def _restore(versions: Iterator[WeightVersion], spill: TmpfsSpill) -> None:
    for version in versions:
        try:
            await spill.restore(version)
        except StorageError as error:  # e.g. damaged files; a replay may write them again
            _log.error("%s could not be brought back: %s", version.name, error)


def _settle_versions(conn: Connection, ephemeral: Path) -> list[WeightVersion]:
    """Drop versions that were never published; return the ephemeral ones, with directories in `ephemeral`."""
    sampling_sessions.drop_unpublished(conn)
    sampling_sessions.settle_ephemeral(conn, ephemeral)
    return sampling_sessions.list_ephemeral_versions(conn)
