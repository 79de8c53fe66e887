"""Composition root of the engine: makes every part from the settings and hands it to those that use it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.domain.values import BaseModelFacts, Gpu
from skyrl_tinker.engine.cleanup import Cleanup
from skyrl_tinker.engine.colocation.placement import SEPARATE, Placement
from skyrl_tinker.engine.deadlines import Deadlines
from skyrl_tinker.engine.engine_metrics import Metrics
from skyrl_tinker.engine.http_server import EngineHttpServer
from skyrl_tinker.engine.intake import Intake
from skyrl_tinker.engine.openai.openai_endpoints import OpenAIServer
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.parity.drift_monitor import BOUNDS, DriftMonitor
from skyrl_tinker.engine.ray_cluster import RayCluster
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.engine.saves.external_exports import Exporter
from skyrl_tinker.engine.saves.sampler_saves import Publisher
from skyrl_tinker.engine.saves.training_saves import Saver
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.planner import Planner
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.engine.trainer.model_barriers import ModelBarriers
from skyrl_tinker.engine.trainer.model_creation import ModelCreation
from skyrl_tinker.engine.trainer.model_lifecycle import ModelLifecycle
from skyrl_tinker.engine.trainer.optim_steps import OptimSteps
from skyrl_tinker.engine.trainer.pass_preparation import PassCoordinator
from skyrl_tinker.engine.trainer.replay import Replay
from skyrl_tinker.engine.trainer.trainer_driver import Executors, TrainerDriver
from skyrl_tinker.engine.unit_commits import UnitCommits
from skyrl_tinker.inference.servers.sampler_spec import SamplerSpec
from skyrl_tinker.protocol.queue_views import QueuesView
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from skyrl_tinker.weight_sync.factory import TransportName, backend_of, choose, make_transport

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be built for


@dataclass(frozen=True, slots=True)
class Environment:
    """Settings and resources of the engine process, which stand before the engine and outlive it."""

    settings: Settings
    directories: Directories
    ray: RayCluster
    store: Store
    bell: Doorbell
    status: EngineStatus


@dataclass(frozen=True, slots=True)
class Backends:
    """Trainer and samplers, up and ready to work."""

    trainer: TrainerGroup
    fleet: Fleet
    samplers: Samplers
    placement: Placement


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the engine that run side by side on its backends."""

    drift_monitor: DriftMonitor
    trainer_driver: TrainerDriver
    sampler_driver: SamplerDriver
    intake: Intake
    cleanup: Cleanup
    deadlines: Deadlines
    http_server: EngineHttpServer


def compose(env: Environment, facts: BaseModelFacts, backends: Backends) -> Parts:
    settings, store, directories = env.settings, env.store, env.directories
    trainer, fleet, samplers = backends.trainer, backends.fleet, backends.samplers
    root, ephemeral = directories.checkpoint_root, directories.ephemeral_dir
    metrics = Metrics()
    outbox = Outbox(store, env.bell, metrics)
    bound = settings.logprob_gap_bound or BOUNDS[settings.trainer_dtype]
    drift_monitor = DriftMonitor(
        store, trainer, samplers, facts, metrics, tokens=settings.gap_probe_tokens, bound=bound
    )
    commits = UnitCommits(outbox)
    snapshots = SnapshotKeeper(
        store,
        trainer,
        commits,
        directories.snapshot_dir,
        replay_s=settings.replay_s,
        share=settings.snapshot_share,
    )
    saver = Saver(store, trainer, commits, root)
    exporter = Exporter(store, trainer, commits, facts, root)
    publisher = Publisher(store, trainer, samplers, commits, facts, ephemeral, root, drift_monitor, metrics)
    creation = ModelCreation(store, trainer, facts, saver, snapshots, settings.max_lora_rank)
    trainer_driver = make_trainer_driver(
        store,
        trainer,
        creation,
        saver,
        exporter,
        publisher,
        outbox,
        commits,
        snapshots,
        settings.unit_tokens,
        drift_monitor,
        metrics,
        backends.placement,
    )
    sampler_driver = SamplerDriver(store, samplers, outbox, settings.sample_concurrency, metrics)
    openai = OpenAIServer(store, samplers, fleet, facts, metrics)
    _register_gauges(metrics, backends, trainer_driver, sampler_driver, snapshots)
    return Parts(
        drift_monitor,
        trainer_driver,
        sampler_driver,
        Intake(store, env.bell, trainer_driver, sampler_driver, metrics),
        Cleanup(
            store,
            trainer_driver,
            creation,
            sampler_driver,
            samplers,
            make_tmpfs_spill(directories),
            settings,
        ),
        Deadlines(
            metrics,
            trainer_driver,
            sampler_driver,
            outbox,
            request_s=settings.request_deadline_s,
            gap_s=settings.gap_deadline_s,
        ),
        EngineHttpServer(
            directories.engine_socket,
            openai,
            metrics,
            lambda: QueuesView(trainer_driver.view(), sampler_driver.view()),
            settings.expanded_body_mb * MiB,
        ),
    )


def make_trainer_driver(
    store: Store,
    trainer: TrainerGroup,
    creation: ModelCreation,
    saver: Saver,
    exporter: Exporter,
    publisher: Publisher,
    outbox: Outbox,
    commits: UnitCommits,
    snapshots: SnapshotKeeper,
    unit_tokens: int,
    drift_monitor: DriftMonitor,
    metrics: Metrics,
    placement: Placement = SEPARATE,
) -> TrainerDriver:
    lanes = Lanes()
    models = ModelLifecycle(store, trainer, lanes, drift_monitor, snapshots, outbox)
    passes = PassCoordinator(store, trainer)
    replay = Replay(store, trainer, passes, snapshots)

    def more_metrics(model: ModelKey) -> Mapping[str, float]:
        return {**drift_monitor.pop_gap(model), **replay.pop_difference(model)}

    executors = Executors(
        passes,
        OptimSteps(store, trainer, lanes, more_metrics),
        publisher,
        ModelBarriers(store, lanes, models, creation, saver, exporter),
    )
    metrics.watch("replayed_units", "Units of work replayed after a crash", lambda: float(replay.units))
    metrics.watch("replay_differences", "Replayed losses that differ", lambda: float(replay.differences))
    return TrainerDriver(
        store,
        trainer,
        lanes,
        Planner(lanes, unit_tokens),
        models,
        executors,
        outbox,
        commits,
        snapshots,
        replay,
        metrics,
        placement,
    )


def make_samplers(settings: Settings, facts: BaseModelFacts, trainer: TrainerGroup, fleet: Fleet) -> Samplers:
    transport = make_transport(_transport_name(settings), trainer, settings.weight_chunk_mb * MiB)
    return Samplers(fleet, transport, facts, settings.max_cpu_loras)


def make_tmpfs_spill(directories: Directories) -> TmpfsSpill:
    return TmpfsSpill(directories.ephemeral_dir, directories.run_dir / "overflow")


def trainer_spec(settings: Settings, directories: Directories, facts: BaseModelFacts) -> TrainerSpec:
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
    )


def sampler_spec(
    settings: Settings, directories: Directories, facts: BaseModelFacts, shared_gpus: tuple[Gpu, ...]
) -> SamplerSpec:
    return SamplerSpec(
        model=facts,
        max_model_len=facts.context_length + 1,  # scoring a full context costs one generated token
        device=settings.device,
        dtype=settings.trainer_dtype,
        max_lora_rank=next(rank for rank in LORA_RANKS if rank >= settings.max_lora_rank),
        max_loras=settings.max_loras,
        max_cpu_loras=settings.max_cpu_loras,
        log_dir=str(directories.log_dir),
        startup_s=settings.sampler_startup_s,
        replicas=settings.replicas,
        tensor_parallel_size=settings.tensor_parallel_size,
        hang_s=settings.sampler_hang_s,
        weight_backend=backend_of(_transport_name(settings)),
        gpu_memory_utilization=settings.gpu_memory_utilization,
        shared_gpus=shared_gpus,
    )


def _transport_name(settings: Settings) -> TransportName:
    return choose(settings.weight_transport, settings.device, settings.placement)


def _register_gauges(
    metrics: Metrics,
    backends: Backends,
    training: TrainerDriver,
    sampler: SamplerDriver,
    snapshots: SnapshotKeeper,
) -> None:
    watch, trainer = metrics.watch, backends.trainer
    watch("training_backlog_tokens", "Estimated tokens of waiting passes", training.backlog)
    watch("samples_queued", "Samples that wait for a free slot", sampler.queued)
    watch("samples_in_flight", "Samples that the samplers have", sampler.in_flight)
    watch("replicas", "Sampler replicas that serve", lambda: backends.fleet.size)
    watch("retried_passes", "Passes that ran out of memory", lambda: float(trainer.retried_passes))
    watch("replay_seconds", "Trainer time that a replay would take now", lambda: snapshots.replay_seconds)
    watch("snapshots", "Snapshots of models taken", lambda: float(snapshots.taken))
    watch("snapshot_seconds", "Trainer time taken by snapshots", lambda: snapshots.spent_s)
    watch("trainer_restarts", "Times that dead workers were replaced", lambda: float(trainer.restarts))
    for phase, totals in backends.placement.totals.items():
        watch(f"turns_{phase}", f"Colocated: times of {phase}", partial(getattr, totals, "count"))
        watch(f"turn_seconds_{phase}", f"Colocated: seconds of {phase}", partial(getattr, totals, "seconds"))
