"""Start-up of the engine: processes of each base model, their check, recovery; reports how far."""

import asyncio
import logging
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.values import BaseModelFacts, Gpu, WeightVersion
from skyrl_tinker.domain.weight_files import are_here, require_whole
from skyrl_tinker.engine.bases.base_memory import base_memory
from skyrl_tinker.engine.bases.base_runtime import BaseRuntime, ReportParts
from skyrl_tinker.engine.colocation.placement import SEPARATE, Colocated
from skyrl_tinker.engine.compose import (
    Environment,
    log_suffix,
    make_samplers,
    make_tmpfs_spill,
    sampler_spec,
    trainer_spec,
)
from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.engine.parity import startup_check
from skyrl_tinker.engine.parity.probe import allowed_gap
from skyrl_tinker.engine.recovery import leftovers, parking
from skyrl_tinker.engine.sampler.launch import ToEnd, launch_servers, make_fleet, open_fleet, sampler_gpus
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.errors import SamplerError, StartupError, StorageError, WeightsAwayError
from skyrl_tinker.inference.constants import START_NICENESS
from skyrl_tinker.inference.servers.external_servers import ExternalServers
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.storage.checkpoint_storage import open_storage
from skyrl_tinker.storage.storage_port import Storage
from skyrl_tinker.store import checkpoint_records, server_state, weight_versions
from skyrl_tinker.store.database.group_commit import Op, T
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import LOAD_THREADS, in_disk_thread
from skyrl_tinker.training.trainer_group import TrainerGroup

_log = logging.getLogger(__name__)


async def read_bases(store: Store) -> Bases:
    bases = await store.read(server_state.get_bases)
    if bases is None:
        raise StartupError("the store names no base model: start the engine with `skyrl-tinker serve`")
    return bases


class StartUp:
    """Runtimes of all base models, and the work that none of them serves without."""

    def __init__(self, env: Environment, bases: Bases, shutdowns: ToEnd) -> None:
        """`shutdowns`: of the runtimes are appended to it."""
        self._env = env
        self._directories = env.directories
        self._bases = bases
        self._shutdowns = shutdowns

    def runtimes(self) -> list[BaseRuntime]:
        """Make them; their processes are still to start. Raises StartupError where GPUs lack."""
        leftovers.sweep_meetings(self._directories.ephemeral_dir)
        env, settings = self._env, self._env.settings
        if settings.device == "cuda":
            self._require_gpus()
        storage = open_storage(settings.checkpoint_root, settings.checkpoint_url)
        several = len(self._bases.all) > 1
        return [
            BaseProcesses(env, facts, number, storage, self._shutdowns, several=several).runtime
            for number, facts in enumerate(self._bases.all)
        ]

    def _require_gpus(self) -> None:
        settings = self._env.settings
        needs = {facts.name: _gpus(settings.for_base(facts.name), facts) for facts in self._bases.all}
        on_demand = [needs.pop(name) for name in [*needs] if settings.idle_s_of(name) is not None]
        ranks, samplers = (sum(each) for each in zip(*needs.values(), strict=True))
        self._env.ray.require_gpus(ranks, samplers, max(map(sum, on_demand), default=0))

    async def tidy_up(self) -> None:
        """Remove the incomplete files of an earlier engine.

        Also restore the unnamed weights that were kept for clients, and park models of other base models.
        Waits while the database fails, as on a full disk.
        """
        root, ephemeral = self._directories.checkpoint_root, self._directories.ephemeral_dir
        of_models = root.glob("[0-9]*/*")  # an import may be writing into its own
        partial_in = chain((ephemeral, root), of_models, self._directories.snapshot_dir.glob("*"))
        await in_disk_thread(leftovers.sweep_partial, partial_in)
        saves = await in_disk_thread(leftovers.list_saves, root)
        await in_disk_thread(
            leftovers.remove, await self._write(partial(leftovers.list_abandoned, saves=saves))
        )
        directories = await persistently(self._env.store.read, checkpoint_records.list_directories)
        recorded = [directory for directory, removed in directories.items() if not removed]
        await in_disk_thread(leftovers.sweep_unrecorded, root, recorded)
        versions = await self._write(partial(_settle_versions, ephemeral=ephemeral))
        spill = make_tmpfs_spill(self._env.settings)
        await in_disk_thread(spill.sweep, {version.name for version in versions})
        remaining = iter(versions)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(LOAD_THREADS):
                tasks.create_task(_restore(remaining, spill))
        fingerprints = {facts.name: await _fingerprint(facts) for facts in self._bases.all if facts.trainable}
        sort = partial(parking.sort_models, fingerprints=fingerprints)
        if parked := await self._write(sort):
            _log.warning("%d models wait, parked, until their base models are served again", parked)

    async def _write(self, op: Op[T]) -> T:
        return await persistently(self._env.store.write, op)


async def _fingerprint(facts: BaseModelFacts) -> str | None:
    """Return that of a base model; None where its files cannot be read, of which its own start fails."""
    try:
        return await in_disk_thread(parking.fingerprint, Path(facts.directory))
    except (OSError, ValueError) as error:
        _log.error("the files of base model %s cannot be read: %s", facts.name, error)
        return None


def _require_weights(facts: BaseModelFacts) -> None:
    """Raise WeightsAwayError while they are fetched from the hub, StartupError if they are damaged."""
    directory = Path(facts.directory)
    if facts.hub_name is not None and not are_here(directory):
        raise WeightsAwayError(f"its weights are still fetched (download.log): {facts.hub_name}")
    require_whole(directory)


def _gpus(settings: Settings, facts: BaseModelFacts) -> tuple[int, int]:
    """Return the GPUs of a base model's ranks, and those of its samplers beside them."""
    return settings.trainer_ranks if facts.trainable else 0, sampler_gpus(settings)


class BaseProcesses:
    """Processes of one base model.

    `number`: its place among all; the logs of its samplers are named by it.
    """

    def __init__(
        self,
        env: Environment,
        facts: BaseModelFacts,
        number: int,
        storage: Storage,
        shutdowns: ToEnd,
        *,
        several: bool,
    ) -> None:
        """`storage`: of checkpoints. `several`: there are other base models."""
        self._env = env
        self._settings = settings = env.settings.for_base(facts.name)
        self._facts = facts
        self._number = number
        self._to_end: ToEnd = []  # since the last start
        self._servers: ServerGroup | ExternalServers | None = None  # likewise
        self._probed: startup_check.Probe | None = None
        whose = f" of {facts.name}" if several else ""
        self._sampler, self._part = f"sampler{whose}", f"trainer{whose}"
        self.parts = {
            *([self._sampler] if facts.sampleable else []),
            *([self._part] if facts.trainable else []),
        }
        self._spec = sampler_spec(settings, env.directories, facts, number)
        trainer = samplers = None
        if facts.trainable:
            niceness = (
                START_NICENESS[settings.device] if env.settings.further_trained else 0
            )  # another trains
            spec = trainer_spec(settings, env.directories, facts, niceness)
            trainer = TrainerGroup.launch(spec, env.ray.require_alive)
            trainer.follow(partial(env.metrics.activity.ranks, facts.name))
        placement = SEPARATE
        if trainer is not None and settings.colocated:
            placement = Colocated(trainer, settings.phases)
        if facts.sampleable:
            clock, token = env.store.now, self._spec.token
            fleet = make_fleet(settings, token, placement, facts.directory, shutdowns, clock)
            samplers = make_samplers(settings, facts, trainer, fleet, env.metrics, storage, env.ray.address)
        idle_s = env.settings.idle_s_of(facts.name)
        on_gpus = settings.device == "cuda"
        size = (
            sum(_gpus(settings, facts)) if on_gpus else base_memory(settings, facts, trained=facts.trainable)
        )
        self.runtime = BaseRuntime(settings, facts, trainer, samplers, storage, placement, self, idle_s, size)
        shutdowns.append(self.end)

    async def start(self, report: ReportParts) -> None:
        """Start trainer and samplers, those of the two that there are, concurrently."""
        runtime, waiting_for = self.runtime, {*self.parts}

        async def during(part: str, ready: Awaitable[None]) -> None:
            await ready
            _log.info("%s: ready", part)
            waiting_for.discard(part)
            await report(waiting_for)

        if runtime.trainer is not None or not self._settings.external_urls:
            await in_disk_thread(_require_weights, self._facts)
        shared: tuple[Gpu, ...] = ()
        async with asyncio.TaskGroup() as tasks:
            if runtime.trainer is not None:
                self._to_end.append(runtime.trainer.shutdown)
                started = tasks.create_task(during(self._part, self._start_trainer(runtime.trainer)))
                if self._settings.colocated:  # a sampler takes its memory at its start
                    await started
                    shared = await runtime.trainer.gpus()
            if runtime.samplers is not None:
                spec = replace(self._spec, shared_gpus=shared)
                servers = self._servers = launch_servers(self._settings, spec, self._to_end)
                tasks.create_task(during(self._sampler, self._await_servers(servers)))
        if runtime.samplers is not None:
            await self._open(runtime.samplers, servers)

    @property
    def pids(self) -> tuple[int, ...]:
        if self._settings.ray_address is not None:
            return ()
        ranks = [] if self.runtime.trainer is None else self.runtime.trainer.pids()
        return (*ranks, *(self._servers.pids() if isinstance(self._servers, ServerGroup) else ()))

    async def _open(self, samplers: Samplers, servers: ServerGroup | ExternalServers) -> None:
        log_dir, suffix = self._env.directories.log_dir, log_suffix(self._number)
        await open_fleet(self._settings, samplers.fleet, servers, log_dir, self._to_end, suffix)
        if self._settings.external_urls:
            await samplers.fleet.adopt(samplers.equip)

    async def check(self) -> None:
        """Compare trainer and samplers, without a trainer two ways of the samplers; without samplers none."""
        samplers, probed, self._probed = self.runtime.samplers, self._probed, None
        if samplers is None or not self._settings.parity.canary:
            return
        if probed is None:
            gap = await startup_check.compare_own(samplers)
            _log.info("logprobs of the %s, as drawn and as scored, differ by at most: %s", self._sampler, gap)
            startup_check.require_agreement(gap, allowed_gap(self._settings), self._sampler)
        else:
            directory = self._env.directories.ephemeral_dir / f"canary{log_suffix(self._number)}"
            gap = await startup_check.compare(probed, samplers, directory)
            _log.info("logprobs of %s and %s differ by at most: %s", self._part, self._sampler, gap)
            startup_check.require_agreement(gap, allowed_gap(self._settings))

    async def end(self) -> None:
        """End all that were started since the last end. Raises TrainerLostError when Ray is gone."""
        self._env.ray.require_alive()  # calls would hang
        to_end, self._to_end = self._to_end, []
        if self.runtime.samplers is not None:
            self.runtime.samplers.fleet.close()
        for outcome in await asyncio.gather(*(end() for end in to_end), return_exceptions=True):
            if isinstance(outcome, BaseException):  # it is dead already
                _log.info("while ending: %s", outcome)
        if self.runtime.samplers is not None:
            self.runtime.samplers.reset()
        if self._probed is not None:
            await self._probed.weights.drop()
            self._probed = None

    async def _start_trainer(self, trainer: TrainerGroup) -> None:
        await trainer.ready()
        directories = self._env.directories
        await trainer.look_for_shared([directories.checkpoint_root, directories.snapshot_dir])
        if self._settings.parity.canary and self.runtime.samplers is not None:
            self._probed = await startup_check.probe(trainer, self._facts)
        if self._settings.colocated:
            await trainer.offload()  # the first phase is the samplers'

    async def _await_servers(self, servers: ServerGroup | ExternalServers) -> None:
        try:
            await servers.ready()
        except SamplerError as error:
            raise SamplerError(f"{self._sampler}: {error}") from error


async def _restore(versions: Iterator[WeightVersion], spill: TmpfsSpill) -> None:
    for version in versions:
        try:
            await spill.restore(version)
        except StorageError as error:  # e.g. damaged files; a replay may write them again
            _log.error("%s could not be brought back: %s", version.name, error)


def _settle_versions(conn: Connection, ephemeral: Path) -> list[WeightVersion]:
    """Drop versions that were never published; return the ephemeral ones, with directories in `ephemeral`."""
    weight_versions.drop_unpublished(conn)
    weight_versions.settle_ephemeral(conn, ephemeral)
    return weight_versions.list_ephemeral_versions(conn)
