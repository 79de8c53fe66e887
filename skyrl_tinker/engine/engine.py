"""The composition root: builds the parts of the engine, starts them side by side, and ends them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from skyrl_tinker.config import MiB, Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.values import BaseModelFacts, Gpu
from skyrl_tinker.engine import recovery
from skyrl_tinker.engine.cleanup import Cleanup
from skyrl_tinker.engine.colocation.placement import Placement, make_placement
from skyrl_tinker.engine.deadlines import Deadlines
from skyrl_tinker.engine.engine_metrics import Metrics
from skyrl_tinker.engine.http_server import EngineHttpServer
from skyrl_tinker.engine.intake import Intake
from skyrl_tinker.engine.openai.openai_endpoints import OpenAIServer
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.parity import startup_check
from skyrl_tinker.engine.parity.drift_monitor import BOUNDS, DriftMonitor
from skyrl_tinker.engine.ray_cluster import RayCluster
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.launch import assemble, launch_servers, sampler_gpus
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.sampler.sleep import SleepControl
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.engine.saves.external_exports import Exporter
from skyrl_tinker.engine.saves.sampler_publisher import Publisher
from skyrl_tinker.engine.saves.training_saves import Saver
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.engine.trainer.model_creation import ModelCreation
from skyrl_tinker.engine.trainer.trainer_driver import TrainerDriver
from skyrl_tinker.errors import SkyrlTinkerError, StartupError
from skyrl_tinker.inference.servers.sampler_spec import SamplerSpec
from skyrl_tinker.processes import spare_the_collector
from skyrl_tinker.protocol.queue_views import QueuesView
from skyrl_tinker.store import sampling_sessions, server_state
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from skyrl_tinker.weight_sync.factory import TransportName, backend_of, choose, make_transport
from skyrl_tinker.weight_sync.sync import WeightTransport

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be built for
PING_S, PING_TIMEOUT_S = 2.0, 30.0
STOP_S = 4.0
FAILED_S = 3.0  # how long a failed start stays visible before the process ends
_log = logging.getLogger(__name__)


class Engine:
    """Builds all parts, starts them side by side, and ends them."""

    def __init__(
        self,
        settings: Settings,
        places: Directories,
        ray: RayCluster,
        store: Store,
        bell: Doorbell,
        status: EngineStatus,
    ) -> None:
        self._settings = settings
        self._ray = ray
        self._places = places
        self._store = store
        self._bell = bell
        self._status = status
        self._metrics = Metrics()
        self._outbox = Outbox(store, bell, self._metrics)
        self._overflow = TmpfsSpill(places.ephemeral_dir, places.run_dir / "overflow")
        self._ready = False
        self._waiting_for = {"trainer", "sampler"}
        self._to_end: list[Callable[[], Awaitable[None]]] = []

    async def run(self, stop: asyncio.Event) -> str | None:
        """Until `stop` is set, or until something breaks that only a new engine can mend: then what."""
        work = asyncio.create_task(self._work())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        error = work.exception() if work.done() else None
        if error is not None:
            await self._report(error, stop)
        for task in (work, stopped):
            task.cancel()
        await asyncio.wait((work, stopped))
        await self._end()
        return None if error is None else str(_cause(error))

    async def _work(self) -> None:
        facts = await self._facts()
        trainer, fleet, samplers, placement = await self._start(facts)
        cursor = await self._recover()
        await self._serve(facts, trainer, fleet, samplers, placement, cursor)

    async def _facts(self) -> BaseModelFacts:
        with self._store.read() as conn:
            value: Any = server_state.get(conn, "base_model")
        if value is None:
            raise StartupError("the store names no base model: start the engine with `skyrl-tinker serve`")
        lists = {key: tuple(each) for key, each in value.items() if isinstance(each, list)}
        return BaseModelFacts(**(value | lists))

    # Starting

    async def _start(self, facts: BaseModelFacts) -> tuple[TrainerGroup, Fleet, Samplers, Placement]:
        if self._settings.device == "cuda":
            self._ray.require_gpus(self._settings.trainer_ranks, sampler_gpus(self._settings))
        await self._say_waiting()
        trainer = TrainerGroup.launch(self._trainer_spec(facts), self._ray.require_alive)
        self._to_end.append(trainer.shutdown)
        placement = make_placement(self._settings, trainer)
        async with asyncio.TaskGroup() as tasks:
            probe = tasks.create_task(self._trainer_up(trainer, facts))
            shared = await self._shared_gpus(trainer, probe)
            servers = launch_servers(self._settings, self._sampler_spec(facts, shared), self._to_end)
            tasks.create_task(self._up("sampler", servers.ready()))
        fleet = await assemble(self._settings, servers, placement, self._places.log_dir, self._to_end)
        samplers = Samplers(fleet, self._transport(trainer), facts, self._settings.max_cpu_loras)
        if self._settings.sampler_urls:
            await fleet.adopt()
        if (probed := probe.result()) is not None:
            await self._compare(probed, samplers, facts)
        return trainer, fleet, samplers, placement

    async def _trainer_up(self, trainer: TrainerGroup, facts: BaseModelFacts) -> startup_check.Probe | None:
        await self._up("trainer", trainer.ready())
        probed = await startup_check.probe(trainer, facts) if self._settings.canary else None
        if self._settings.placement == "colocated":
            await trainer.offload()  # the samplers have the first turn
        return probed

    async def _shared_gpus(self, trainer: TrainerGroup, up: Awaitable[Any]) -> tuple[Gpu, ...]:
        """The trainer's, once it is up and off them: vLLM takes its memory when it starts."""
        if self._settings.placement != "colocated":
            return ()
        await up
        return await trainer.gpus()

    async def _up(self, name: str, ready: Awaitable[None]) -> None:
        await ready
        _log.info("the %s is up", name)
        self._waiting_for.discard(name)
        await self._say_waiting()

    async def _say_waiting(self) -> None:
        parts = " and ".join(sorted(self._waiting_for)) or "the comparison of trainer and sampler"
        await self._status.say("starting", f"waiting for {parts}")

    async def _compare(self, probed: startup_check.Probe, samplers: Samplers, facts: BaseModelFacts) -> None:
        gap = await startup_check.compare(probed, samplers, facts, self._places.ephemeral_dir / "canary")
        _log.info("logprobs of trainer and sampler differ by at most: %s", gap)
        startup_check.require_agreement(gap, self._settings.trainer_dtype)

    async def _recover(self) -> int:
        """The id of the last future that is dealt with."""
        root = self._places.checkpoint_root
        ephemeral = self._places.ephemeral_dir
        await asyncio.to_thread(recovery.sweep_partial, [ephemeral, root, *root.glob("*/*")])
        with self._store.read() as conn:
            versions = sampling_sessions.list_ephemeral_versions(conn)
        await asyncio.to_thread(self._overflow.sweep, {version.name for version in versions})
        lost = await recovery.recover(self._store, self._status.died_after)
        if lost:
            _log.warning("%d models of an earlier engine are lost", lost)
        self._status.recovered()
        return self._status.died_after

    def _trainer_spec(self, facts: BaseModelFacts) -> TrainerSpec:
        settings = self._settings
        return TrainerSpec(
            directory=facts.directory,
            ranks=settings.trainer_ranks,
            device=settings.device,
            dtype=settings.trainer_dtype,
            threads=settings.trainer_threads,
            token_budget=settings.token_budget,
            resident_models=settings.resident_models,
            memory_gb=settings.trainer_memory_gb,
            gradient_checkpointing=settings.gradient_checkpointing,
            state_dir=str(self._places.ephemeral_dir / "trainer"),
        )

    def _sampler_spec(self, facts: BaseModelFacts, shared: tuple[Gpu, ...]) -> SamplerSpec:
        settings = self._settings
        return SamplerSpec(
            model=facts,
            max_model_len=facts.context_length + 1,  # scoring a full context costs one generated token
            device=settings.device,
            dtype=settings.trainer_dtype,
            max_lora_rank=next(rank for rank in LORA_RANKS if rank >= settings.max_lora_rank),
            max_loras=settings.max_loras,
            max_cpu_loras=settings.max_cpu_loras,
            log_dir=str(self._places.log_dir),
            startup_s=settings.sampler_startup_s,
            replicas=settings.replicas,
            tensor_parallel_size=settings.tensor_parallel_size,
            hang_s=settings.sampler_hang_s,
            weight_backend=backend_of(self._transport_name()),
            gpu_memory_utilization=settings.gpu_memory_utilization,
            shared_gpus=shared,
        )

    def _transport_name(self) -> TransportName:
        return choose(self._settings.weight_transport, self._settings.device, self._settings.placement)

    def _transport(self, trainer: TrainerGroup) -> WeightTransport:
        return make_transport(self._transport_name(), trainer, self._settings.weight_chunk_mb * MiB)

    # Working

    async def _serve(
        self,
        facts: BaseModelFacts,
        trainer: TrainerGroup,
        fleet: Fleet,
        samplers: Samplers,
        placement: Placement,
        cursor: int,
    ) -> None:
        settings, store, metrics = self._settings, self._store, self._metrics
        gaps = self._gap_monitor(trainer, samplers, facts)
        await gaps.begin()
        training = self._trainer_driver(facts, trainer, samplers, placement, gaps)
        sampler = SamplerDriver(store, samplers, self._outbox, settings.sample_concurrency, metrics)
        self._watch_queues(training, sampler, fleet)
        self._watch_trainer(trainer)
        self._watch_turns(placement)
        openai = OpenAIServer(store, samplers, fleet, facts, metrics)
        await self._open_gateway(openai, training, sampler)
        spare_the_collector()
        await self._say_ready()
        cleaner = self._session_keeper(training, sampler, samplers)
        deadlines = self._deadlines(training, sampler)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(training.run())
            tasks.create_task(sampler.run())
            tasks.create_task(Intake(store, self._bell, training, sampler, cursor, metrics).run())
            tasks.create_task(cleaner.run())
            tasks.create_task(deadlines.run())
            tasks.create_task(fleet.supervise(self._status))
            tasks.create_task(placement.run(SleepControl(fleet)))
            tasks.create_task(_watch(trainer))
            tasks.create_task(_watch_ray(self._ray))

    def _trainer_driver(
        self,
        facts: BaseModelFacts,
        trainer: TrainerGroup,
        samplers: Samplers,
        placement: Placement,
        gaps: DriftMonitor,
    ) -> TrainerDriver:
        settings, store, outbox, metrics = self._settings, self._store, self._outbox, self._metrics
        root, ephemeral = self._places.checkpoint_root, self._places.ephemeral_dir
        saver = Saver(store, trainer, outbox, root)
        return TrainerDriver(
            store,
            trainer,
            ModelCreation(store, trainer, facts, saver, settings.max_lora_rank),
            saver,
            Exporter(store, trainer, outbox, facts, root),
            Publisher(store, trainer, samplers, outbox, facts, ephemeral, root, metrics),
            outbox,
            settings.unit_tokens,
            gaps,
            metrics,
            placement,
        )

    async def _open_gateway(
        self, openai: OpenAIServer, training: TrainerDriver, sampler: SamplerDriver
    ) -> None:
        gateway = EngineHttpServer(
            self._places.engine_socket,
            openai,
            self._metrics,
            lambda: QueuesView(training.view(), sampler.view()),
            self._settings.expanded_body_mb * MiB,
        )
        self._to_end.append(gateway.close)
        await gateway.start()

    def _session_keeper(self, training: TrainerDriver, sampler: SamplerDriver, samplers: Samplers) -> Cleanup:
        settings = self._settings
        return Cleanup(
            self._store,
            training,
            sampler,
            samplers,
            self._overflow,
            settings.session_timeout_s,
            settings.result_ttl_s,
            settings.stability_ttl_s,
        )

    def _deadlines(self, training: TrainerDriver, sampler: SamplerDriver) -> Deadlines:
        return Deadlines(
            self._metrics,
            training,
            sampler,
            self._outbox,
            request_s=self._settings.request_deadline_s,
            gap_s=self._settings.gap_deadline_s,
        )

    async def _say_ready(self) -> None:
        await self._status.say("ready", "")
        self._ready = True
        _log.info("ready")

    def _gap_monitor(self, trainer: TrainerGroup, samplers: Samplers, facts: BaseModelFacts) -> DriftMonitor:
        settings = self._settings
        return DriftMonitor(
            self._store,
            trainer,
            samplers,
            facts,
            self._metrics,
            tokens=settings.gap_probe_tokens,
            bound=settings.logprob_gap_bound or BOUNDS[settings.trainer_dtype],
        )

    def _watch_queues(self, training: TrainerDriver, sampler: SamplerDriver, fleet: Fleet) -> None:
        watch = self._metrics.watch
        watch("training_backlog_tokens", "About how many tokens of passes wait", training.backlog)
        watch("samples_queued", "Samples that wait for a free slot", sampler.queued)
        watch("samples_in_flight", "Samples that the samplers have", sampler.in_flight)
        watch("replicas", "Sampler replicas that serve", lambda: fleet.size)

    def _watch_trainer(self, trainer: TrainerGroup) -> None:
        watch = self._metrics.watch
        watch("retried_passes", "Passes that ran out of memory", lambda: float(trainer.retried_passes))
        watch("trainer_restarts", "Times that dead workers were replaced", lambda: float(trainer.restarts))

    def _watch_turns(self, placement: Placement) -> None:
        for turn, spent in placement.spent.items():
            self._metrics.watch(f"turns_{turn}", f"Colocated: how often it was {turn}", spent.turns)
            self._metrics.watch(f"turn_seconds_{turn}", f"Colocated: seconds of {turn}", spent.duration)

    # Ending

    async def _report(self, error: BaseException, stop: asyncio.Event) -> None:
        """Say why. A start that failed stays visible for a moment before whoever watches starts another."""
        cause = _cause(error)
        _log.error("the engine failed: %s", cause, exc_info=None if _foreseen(cause) else cause)
        if not self._ready:
            await self._status.say("failed", str(cause))
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), FAILED_S)

    async def _end(self) -> None:
        """What does not end in time is killed with all other descendants."""
        ends = [asyncio.create_task(_end_one(end)) for end in self._to_end]
        if ends:
            await asyncio.wait(ends, timeout=STOP_S)


async def _end_one(end: Callable[[], Awaitable[None]]) -> None:
    try:
        await end()
    except SkyrlTinkerError as error:  # dead already: ending it is all that is wanted
        _log.info("while ending: %s", error)


async def _watch(trainer: TrainerGroup) -> None:
    """Workers that die while nothing runs are replaced. Raises TrainerError when that is of no use."""
    while True:
        await trainer.watch(PING_TIMEOUT_S)
        await asyncio.sleep(PING_S)


async def _watch_ray(ray: RayCluster) -> None:
    """Raises TrainerError when it is gone: the models are gone with it."""
    while True:
        ray.require_alive()
        await asyncio.sleep(PING_S)


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _foreseen(error: BaseException) -> bool:
    return isinstance(error, SkyrlTinkerError)
