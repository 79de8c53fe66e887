"""Composition of the engine's training half: from the journal to the ranks."""

import asyncio
from functools import partial

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.engine.bases.base_runtime import BaseRuntime
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.parity.drift_monitor import DriftMonitor
from skyrl_tinker.engine.parity.probe import allowed_gap
from skyrl_tinker.engine.parity.warning_board import WarningBoard
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.sampler.ephemeral_versions import EphemeralVersions
from skyrl_tinker.engine.saves.external_exports import Exporter
from skyrl_tinker.engine.saves.sampler_saves import Publisher
from skyrl_tinker.engine.saves.training_saves import Saver
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.planner import PassBudget, Planner
from skyrl_tinker.engine.scheduling.throughput import TrainerPace
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.trainer.model_barriers import ModelBarriers
from skyrl_tinker.engine.trainer.model_creation import ModelCreation
from skyrl_tinker.engine.trainer.model_lifecycle import ModelLifecycle
from skyrl_tinker.engine.trainer.model_returns import ModelReturns
from skyrl_tinker.engine.trainer.optim_steps import OptimSteps
from skyrl_tinker.engine.trainer.pass_preparation import PassCoordinator
from skyrl_tinker.engine.trainer.replay import Replay
from skyrl_tinker.engine.trainer.sleeping_models import SleepingModels
from skyrl_tinker.engine.trainer.trainer_driver import TrainerDriver
from skyrl_tinker.engine.trainer.training_requests import TrainingRequests
from skyrl_tinker.engine.trainer.unit_execution import UnitExecution
from skyrl_tinker.engine.unit_commits import PendingWrites, UnitCommits
from skyrl_tinker.storage.checkpoint_storage import open_storage
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup

UNIT_TOKENS = 16384
SHARED_PASS_S = 0.075
"""Most work of a pass of several requests while several sessions train: a request waits for one other."""


def unit_tokens(settings: Settings) -> int:
    """Return the tokens that a unit of work takes from all lanes: UNIT_TOKENS, or two rows of every rank."""
    return max(UNIT_TOKENS, 2 * settings.trainer_ranks * settings.token_budget)


def compose_training(
    base: BaseRuntime,
    trainer: TrainerGroup,
    store: Store,
    outbox: Outbox,
    versions: EphemeralVersions,
    warnings: WarningBoard,
    metrics: Metrics,
) -> tuple[TrainerDriver, ModelCreation]:
    """Return its parts that are used outside."""
    settings, facts, samplers = base.settings, base.facts, base.samplers
    placement, storage, directories = base.placement, base.storage, Directories(settings)
    root, ephemeral = directories.checkpoint_root, directories.ephemeral_dir
    lanes, woken = Lanes(), asyncio.Event() if samplers is None else samplers.gate.asked
    commits, pending = UnitCommits(outbox), PendingWrites()
    tokens, bound = settings.parity.probe_tokens, allowed_gap(settings)
    drift_monitor = DriftMonitor(warnings, trainer, samplers, facts, metrics, tokens=tokens, bound=bound)
    snapshot_dir, recovery = directories.snapshot_dir, settings.recovery
    copies = open_storage(snapshot_dir, settings.snapshot_url, "models")
    kept = snapshot_dir, versions.keep_sampled, copies, recovery, lanes.saves_until
    snapshots = SnapshotKeeper(store, trainer, commits, *kept)

    def written(row: QueuedRow) -> None:
        lanes.write_ended(row)
        woken.set()

    flow = store, trainer, commits, pending, root, storage
    saver, exporter = Saver(*flow), Exporter(*flow, facts)
    published = partial(metrics.published, facts.name)
    publisher = Publisher(*flow, samplers, ephemeral, drift_monitor, published, written)
    creation = ModelCreation(store, trainer, facts, saver, snapshots, settings.max_lora_rank, storage)
    models = ModelLifecycle(store, trainer, lanes, drift_monitor, snapshots, outbox, commits, facts.names)
    passes = PassCoordinator(store, trainer, router_replay=settings.router_replay)
    steps = OptimSteps(store, trainer, lanes, drift_monitor.pop_metrics)
    barriers = ModelBarriers(store, lanes, models, creation, saver, exporter)
    kinds = passes, steps, publisher, barriers
    passed = partial(metrics.passed, facts.name)
    execution = UnitExecution(
        store, trainer, lanes, models, *kinds, commits, pending, snapshots, passed, woken
    )

    most = unit_tokens(settings)
    returns = ModelReturns(store, trainer, snapshots, placement, facts.names)
    replay = Replay(store, trainer, returns, passes, snapshots, drift_monitor, placement, most)
    pace = TrainerPace()
    planner = Planner(lanes, PassBudget(most, SHARED_PASS_S), pace.seconds)
    requests = TrainingRequests(store, lanes, models, facts, outbox, metrics, woken)
    sleeping = SleepingModels(returns, lanes, models, execution)
    work = models, execution, requests, snapshots, replay, sleeping
    driver = TrainerDriver(store, trainer, lanes, planner, pace, *work, metrics, placement, woken)
    _register_gauges(metrics, facts.name, trainer, driver, snapshots, replay)
    return driver, creation


def _register_gauges(
    metrics: Metrics,
    base_model: str,
    trainer: TrainerGroup,
    driver: TrainerDriver,
    snapshots: SnapshotKeeper,
    replay: Replay,
) -> None:
    watch = partial(metrics.watch, base_model)
    watch("training_backlog_tokens", "Estimated tokens of waiting passes", driver.requests.lanes.backlog)
    watch("exhausted_passes", "Passes that ran out of memory", lambda: float(trainer.exhausted_passes))
    watch("trainer_restarts", "Times that dead workers were replaced", lambda: float(trainer.restarts))
    watch("snapshots", "Snapshots of models taken", lambda: float(snapshots.taken))
    watch("snapshot_seconds", "Trainer time taken by snapshots", lambda: snapshots.spent_s)
    watch(
        "replay_seconds",
        "Time that a replay would take now, as estimated",
        lambda: snapshots.work.replay_seconds,
    )
    watch("replayed_units", "Units of work replayed after a crash", lambda: float(replay.units))
    watch("replay_differences", "Replayed passes whose logprobs differ", lambda: float(replay.differences))
