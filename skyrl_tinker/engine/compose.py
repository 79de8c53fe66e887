"""Composition root of the engine: makes every part from the settings and passes it to its users."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.exc import OperationalError

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine.bases.base_room import BaseRoom, in_gpus, in_memory
from skyrl_tinker.engine.bases.base_runtime import BaseRuntime
from skyrl_tinker.engine.bases.base_statuses import BaseStatuses
from skyrl_tinker.engine.bases.base_supervisor import BaseSupervisor, BaseSwitch
from skyrl_tinker.engine.bases.sample_dispatch import SampleDispatch
from skyrl_tinker.engine.bases.train_dispatch import TrainDispatch
from skyrl_tinker.engine.deadlines import Deadlines
from skyrl_tinker.engine.gaps import Gaps
from skyrl_tinker.engine.http_server import EngineHttpServer, OpenAddress
from skyrl_tinker.engine.intake import Intake
from skyrl_tinker.engine.openai.chat_abilities import chat_abilities
from skyrl_tinker.engine.openai.openai_relay import OpenAIRelay
from skyrl_tinker.engine.openai.openai_routes import OpenAIRoutes
from skyrl_tinker.engine.openai.openai_server import OpenAIServer
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.parity.probe import allowed_gap
from skyrl_tinker.engine.parity.warning_board import WarningBoard
from skyrl_tinker.engine.ray_cluster import RayCluster
from skyrl_tinker.engine.sampler.adapter_cache import AdapterLimits
from skyrl_tinker.engine.sampler.ephemeral_versions import EphemeralVersions
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.sampler_driver import CONCURRENCY, SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.engine.scheduling.slots import Concurrency
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.training_half import compose_training
from skyrl_tinker.engine.upkeep.cleanup import Cleanup
from skyrl_tinker.inference.client.replica_metrics import replica_metrics
from skyrl_tinker.inference.sampling_engine import engine_of
from skyrl_tinker.inference.servers.replica_spec import SamplerSpec
from skyrl_tinker.protocol.queue_views import QueuesView
from skyrl_tinker.storage.checkpoint_storage import open_storage
from skyrl_tinker.storage.storage_port import Storage
from skyrl_tinker.store import owners
from skyrl_tinker.store.cluster.signing_secrets import SigningSecrets
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.host_memory import host_memory
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from skyrl_tinker.weight_sync.factory import CHUNK_BYTES, TRANSPORTS, TransportName, choose, make_transport
from skyrl_tinker.weight_sync.transport import LOOPBACK, NoSenders

if TYPE_CHECKING:
    from skyrl_tinker.engine.telemetry.otlp_export import SpanExport


@dataclass(frozen=True, slots=True)
class Environment:
    """Settings and resources of the engine process, which are made before the engine and outlive it."""

    settings: Settings
    directories: Directories
    ray: RayCluster
    store: Store
    bell: Doorbell
    status: EngineStatus
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the engine that run side by side."""

    statuses: BaseStatuses
    bases: Sequence[BaseSupervisor]
    warnings: WarningBoard
    training: TrainDispatch
    samples: SampleDispatch
    intake: Intake
    cleanup: Cleanup
    deadlines: Deadlines
    http_server: EngineHttpServer
    span_export: "SpanExport | None"


def compose(env: Environment, runtimes: Sequence[BaseRuntime]) -> Parts:
    """Make the parts. At least one of the runtimes has a trainer."""
    settings, store, bell, metrics = env.settings, env.store, env.bell, env.metrics
    outbox, storage, warnings = Outbox(store, bell, metrics), runtimes[0].storage, WarningBoard(store)
    sampled = [(runtime, runtime.samplers) for runtime in runtimes if runtime.samplers is not None]
    every = [samplers for _, samplers in sampled]
    drivers = [_sampler_driver(store, outbox, metrics, *each) for each in sampled]
    samples = SampleDispatch(drivers, outbox, metrics)
    versions = EphemeralVersions(store, every, samples.forget_sources, make_tmpfs_spill(settings), settings)
    halves = [
        compose_training(runtime, runtime.trainer, store, outbox, versions, warnings, metrics)
        for runtime in runtimes
        if runtime.trainer is not None
    ]
    training = TrainDispatch([driver for driver, _ in halves], store)
    openai = [
        _openai_server(store, metrics, *each, driver) for each, driver in zip(sampled, drivers, strict=True)
    ]
    statuses = _make_statuses(env, runtimes)
    for each, driver in zip(sampled, drivers, strict=True):
        _register_gauges(metrics, statuses, *each, driver)
    room, of = _make_room(env, runtimes), {driver.facts.name: driver for driver in training.drivers}
    bases = [BaseSupervisor(runtime, of.get(runtime.facts.name), statuses, room) for runtime in runtimes]

    def is_loading(directory: str) -> bool:
        return any(creation.is_loading(directory) for _, creation in halves)

    gaps = Gaps(store, bell, training)
    return Parts(
        statuses,
        bases,
        warnings,
        training,
        samples,
        Intake(store, bell, training, samples, metrics),
        Cleanup(store, training, samples, is_loading, versions, settings, storage),
        Deadlines(store, metrics, training, samples, gaps, settings.timeouts.request_s),
        _make_http_server(env, runtimes, training, samples, openai, BaseSwitch(bases)),
        make_span_export(settings, store, metrics),
    )


def _make_http_server(
    env: Environment,
    runtimes: Sequence[BaseRuntime],
    training: TrainDispatch,
    samples: SampleDispatch,
    openai: Sequence[OpenAIServer],
    switch: BaseSwitch,
) -> EngineHttpServer:
    metrics = env.metrics

    def queues() -> QueuesView:
        rates = metrics.trained_meter.rates(), metrics.sampled_meter.rates()
        pids = {each.facts.name: each.processes.pids for each in runtimes}
        return QueuesView(training.views(), samples.views(), *rates, switch.idle(), pids)

    return EngineHttpServer(
        env.directories.engine_socket,
        OpenAIRoutes(env.store, openai, metrics),
        metrics,
        lambda: replica_metrics([each.samplers.fleet.endpoints for each in runtimes if each.samplers]),
        queues,
        switch.change,
        env.settings.bodies.json_mb * MiB,
        _open_address(env.settings),
    )


def _make_statuses(env: Environment, runtimes: Sequence[BaseRuntime]) -> BaseStatuses:
    return BaseStatuses(
        env.status,
        {each.facts.name: each.samplers.fleet if each.samplers else None for each in runtimes},
        [each.facts.name for each in runtimes if each.trainer is not None],
        {each.facts.name: each.processes.parts for each in runtimes},
        [each.facts.name for each in runtimes if each.idle_s is not None],
    )


def _make_room(env: Environment, runtimes: Sequence[BaseRuntime]) -> BaseRoom:
    """Make the room of base models on demand: the GPUs, or on CPUs the memory, that the others leave."""
    needs = {each.facts.name: each.size for each in runtimes if each.idle_s is not None}
    if not any(needs.values()):
        return BaseRoom()
    on_gpus = env.settings.device == "cuda"
    size, told = (env.ray.gpus, in_gpus) if on_gpus else (host_memory().available, in_memory)
    return BaseRoom(size - sum(each.size for each in runtimes if each.idle_s is None), needs, told)


def _sampler_driver(
    store: Store, outbox: Outbox, metrics: Metrics, runtime: BaseRuntime, samplers: Samplers
) -> SamplerDriver:
    chosen, device = runtime.settings.sample_concurrency, runtime.settings.device
    concurrency = Concurrency(chosen, chosen) if chosen else CONCURRENCY[device]
    replay = runtime.settings.router_replay
    return SamplerDriver(store, samplers, outbox, concurrency, metrics, router_replay=replay)


def _openai_server(
    store: Store, metrics: Metrics, runtime: BaseRuntime, samplers: Samplers, driver: SamplerDriver
) -> OpenAIServer:
    settings, facts = runtime.settings, runtime.facts
    parsers = settings.reasoning_parser, settings.tool_parser
    abilities = partial(chat_abilities, Path(facts.directory), *parsers)
    relay = OpenAIRelay(store, samplers, samplers.fleet, facts.name, driver, metrics)
    return OpenAIServer(samplers, samplers.fleet, facts, abilities, driver, relay)


def _open_address(settings: Settings) -> OpenAddress | None:
    if settings.engine_address is None:
        return None
    secrets = SigningSecrets(settings.root)

    def token() -> str:
        secrets.refresh()
        return secrets.current.engine_token

    return OpenAddress(*settings.engine_address, token)


def make_span_export(settings: Settings, store: Store, metrics: Metrics) -> "SpanExport | None":
    if settings.otlp_endpoint is None:
        return None
    from skyrl_tinker.engine.telemetry.otlp_export import SpanExport  # needs the extra otlp

    return SpanExport(store, metrics.activity, settings.otlp_endpoint, settings.root)


def make_metrics(settings: Settings, store: Store) -> Metrics:
    """Build the metrics, with those by owner if reading them requires a key."""
    return Metrics(partial(_owner_name, store) if settings.metrics_key else None, store.now)


def make_samplers(
    settings: Settings,
    facts: BaseModelFacts,
    trainer: TrainerGroup | None,
    fleet: Fleet,
    metrics: Metrics,
    storage: Storage,
    host: str = LOOPBACK,
) -> Samplers:
    """`host`: address of this host for samplers on others."""
    senders = trainer or NoSenders(facts.name)
    transport = make_transport(_transport_name(settings), senders, CHUNK_BYTES, host)
    adapters = AdapterLimits(settings.max_cpu_loras, settings.max_loras if settings.max_lora_rank else 0)
    keep_cache = settings.inflight_cache == "keep"
    return Samplers(fleet, transport, facts, adapters, metrics, storage, keep_cache=keep_cache)


def make_tmpfs_spill(settings: Settings) -> TmpfsSpill:
    directories = Directories(settings)
    storage = open_storage(directories.overflow_dir, settings.snapshot_url, "unnamed")
    return TmpfsSpill(directories.ephemeral_dir, directories.overflow_dir, storage)


def trainer_spec(
    settings: Settings, directories: Directories, facts: BaseModelFacts, start_niceness: int
) -> TrainerSpec:
    return TrainerSpec(
        directory=facts.directory,
        ranks=settings.trainer_ranks,
        device=settings.device,
        dtype=settings.trainer_dtype,
        threads=1,  # several would sum up in another order
        token_budget=settings.token_budget,
        resident_models=settings.resident_models,
        gradient_checkpointing=settings.gradient_checkpointing,
        network_interface=settings.network_interface,
        start_niceness=start_niceness,
        expandable_segments=TRANSPORTS[_transport_name(settings)].backend != "ipc",
        memory_root=str(directories.ephemeral_dir),
    )


def sampler_spec(
    settings: Settings, directories: Directories, facts: BaseModelFacts, base: int
) -> SamplerSpec:
    """Specify the samplers of a base model; `base`: its number."""
    return SamplerSpec(
        model=facts,
        device=settings.device,
        dtype=settings.trainer_dtype,
        max_lora_rank=settings.max_lora_rank,
        max_loras=settings.max_loras,
        max_cpu_loras=settings.max_cpu_loras,
        log_dir=str(directories.log_dir),
        log_suffix=log_suffix(base),
        replicas=settings.replicas,
        tensor_parallel_size=settings.tensor_parallel_size,
        sampled_logprobs=settings.sampled_logprobs,
        router_replay=settings.router_replay,
        reasoning_parser=settings.reasoning_parser,
        tool_parser=settings.tool_parser,
        weight_backend=TRANSPORTS[_transport_name(settings)].backend,
        keeps_cache=settings.inflight_cache == "keep",
        gpu_memory_utilization=settings.gpu_memory_utilization,
        network_interface=settings.network_interface,
        token=secrets.token_hex(32),
        engine=engine_of(settings),
    )


def log_suffix(base: int) -> str:
    """Return what is in the names of the logs of a base model's samplers; of the first, number 0, nothing."""
    return f"-{base}" if base else ""


async def _owner_name(store: Store, owner: OwnerId | None) -> str | None:
    try:
        return await store.read(lambda conn: owners.name_of(conn, owner))
    except OperationalError:  # asked again with the next request
        return None


def _transport_name(settings: Settings) -> TransportName:
    return choose(
        settings.weight_transport,
        settings.device,
        colocated=settings.colocated,
        torch_groups=engine_of(settings).torch_groups,
    )


def _register_gauges(
    metrics: Metrics, statuses: BaseStatuses, runtime: BaseRuntime, samplers: Samplers, driver: SamplerDriver
) -> None:
    """Register the gauges of the samplers of a base model."""
    name, bound = runtime.facts.name, allowed_gap(runtime.settings)
    fleet, watch = samplers.fleet, partial(metrics.watch, name)
    watch("sampler_logprob_gap_bound", "Gap above which there is a warning", lambda: bound)
    watch("samples_queued", "Samples that wait for a free slot", driver.queued)
    watch("samples_in_flight", "Samples that the samplers have", driver.in_flight)
    watch("replicas", "Sampler replicas that serve", lambda: fleet.size)
    watch(
        "replicas_expected",
        "Sampler replicas that should serve; 0 while the base model is stopped or being started",
        lambda: statuses.expected_replicas(name),
    )
    for phase, totals in runtime.placement.totals.items():
        watch(f"turns_{phase}", f"Colocated: times of {phase}", partial(getattr, totals, "count"))
        watch(f"turn_seconds_{phase}", f"Colocated: seconds of {phase}", partial(getattr, totals, "seconds"))
