"""Start-up of the engine: trainer, samplers, comparison of both, recovery; reports its progress."""

import asyncio
import logging
from collections.abc import Awaitable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.domain.values import BaseModelFacts, Gpu, WeightVersion
from skyrl_tinker.engine.colocation.placement import make_placement
from skyrl_tinker.engine.compose import (
    BaseRuntime,
    Environment,
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
from skyrl_tinker.errors import StartupError, StorageError
from skyrl_tinker.store import checkpoint_records, sampling_sessions, server_state
from skyrl_tinker.store.database.group_commit import Op, T
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import TRANSFER_THREADS, in_disk_thread
from skyrl_tinker.training.trainer_group import TrainerGroup

_log = logging.getLogger(__name__)


async def read_base_model(store: Store) -> BaseModelFacts:
    bases = await store.read(server_state.get_bases)
    if bases is None:
        raise StartupError("the store names no base model: start the engine with `skyrl-tinker serve`")
    return bases.first


class StartUp:
    """Brings up a base model; appends the shutdowns of its trainer and samplers to `shutdowns`."""

    def __init__(self, env: Environment, facts: BaseModelFacts, shutdowns: ToEnd) -> None:
        self._env = env
        self._settings = env.settings
        self._directories = env.directories
        self._facts = facts
        self._shutdowns = shutdowns
        self._waiting_for = {"trainer", "sampler", "clean-up"}

    async def bring_up(self) -> BaseRuntime:
        """Start trainer and samplers concurrently, and tidy up meanwhile.

        Raises StartupError if their logprobs differ too much.
        """
        settings, directories, facts = self._settings, self._directories, self._facts
        if settings.device == "cuda":
            self._env.ray.require_gpus(settings.trainer_ranks, sampler_gpus(settings))
        await self._report()
        trainer = TrainerGroup.launch(trainer_spec(settings, directories, facts), self._env.ray.require_alive)
        self._shutdowns.append(trainer.shutdown)
        placement = make_placement(settings, trainer)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._await_ready("clean-up", self.tidy_up()))
            probe = tasks.create_task(self._start_trainer(trainer))
            shared = await self._shared_gpus(trainer, probe)
            spec = sampler_spec(settings, directories, facts, shared)
            servers = launch_servers(settings, spec, self._shutdowns)
            tasks.create_task(self._await_ready("sampler", servers.ready()))
        fleet = await assemble(
            *(settings, servers, placement, facts.directory, directories.log_dir, self._shutdowns),
            self._env.store.now,
        )
        samplers = make_samplers(settings, facts, trainer, fleet, self._env.metrics, self._env.ray.address)
        if settings.external_urls:
            await fleet.adopt(samplers.equip)
        if (probed := probe.result()) is not None:
            await self._compare(probed, samplers)
        return BaseRuntime(facts, trainer, fleet, samplers, placement)

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
        fingerprint = await in_disk_thread(parking.fingerprint, Path(self._facts.directory))
        sort = partial(parking.sort_models, fingerprint=fingerprint, names=self._facts.names)
        if parked := await self._write(sort):
            _log.warning("%d models wait, parked, until their base models are served again", parked)

    async def _write(self, op: Op[T]) -> T:
        return await persistently(lambda: self._env.store.write(op))

    async def _start_trainer(self, trainer: TrainerGroup) -> startup_check.Probe | None:
        await self._await_ready("trainer", trainer.ready())
        await trainer.look_for_shared([self._directories.checkpoint_root, self._directories.snapshot_dir])
        probed = await startup_check.probe(trainer, self._facts) if self._settings.parity.canary else None
        if self._settings.colocated:
            await trainer.offload()  # the first phase is the samplers'
        return probed

    async def _shared_gpus(self, trainer: TrainerGroup, started: Awaitable[Any]) -> tuple[Gpu, ...]:
        """Return the trainer's GPUs once it is offloaded: a sampler takes its memory at its start."""
        if not self._settings.colocated:
            return ()
        await started
        return await trainer.gpus()

    async def _await_ready(self, name: str, ready: Awaitable[None]) -> None:
        await ready
        _log.info("%s: ready", name)
        self._waiting_for.discard(name)
        await self._report()

    async def _report(self) -> None:
        parts = ", ".join(sorted(self._waiting_for)) or "the comparison of trainer and sampler"
        await persistently(lambda: self._env.status.report("starting", f"waiting for {parts}"))

    async def _compare(self, probed: startup_check.Probe, samplers: Samplers) -> None:
        directory = self._directories.ephemeral_dir / "canary"
        gap = await startup_check.compare(probed, samplers, directory)
        _log.info("logprobs of trainer and sampler differ by at most: %s", gap)
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
