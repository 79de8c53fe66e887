"""A trainer driver on a real store. The workers are scripted: what they compute does not matter."""

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import FutureStatus, ModelId, ModelKey
from skyrl_tinker.domain.manifest import Manifest, entry_of, write_manifest
from skyrl_tinker.domain.peft_config import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from skyrl_tinker.domain.values import (
    BaseModelFacts,
    Failure,
    LoraSpec,
    OptimizerFamily,
    PassItem,
    PassOutput,
    StepItem,
    StepOutput,
)
from skyrl_tinker.engine.compose import make_tmpfs_spill
from skyrl_tinker.engine.intake import Intake
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.sampler.ephemeral_versions import EphemeralVersions
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.training_half import compose_training
from skyrl_tinker.errors import TrainerError, UserError
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures.outcomes import Outcome
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import PassResult, TrainerGroup
from tests.engine.support import journal

STEPS_FILE = "steps.json"
FACTS = BaseModelFacts("/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))


@dataclass
class Trained:
    """State of a model: its steps, each with the seq_ids of its passes, and the passes since the last one."""

    steps: list[list[int]] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)


@dataclass
class CapturedSteps:
    model: ModelKey
    steps: list[list[int]]

    async def drop(self) -> None:
        """Free nothing."""


def _silent(item: PassItem) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(datum.target_tokens.shape, np.float32) for datum in item.data)


class CapturedWeights(CapturedSteps):
    """What samplers need of a model."""


class CapturedExport(str):
    """Of a model, by name."""

    async def drop(self) -> None:
        """Free nothing."""


class Workers:
    """Records its calls; fails what `failing` holds, and dies of passes of `deadly` models.

    For passes of `large` models there is no memory.

    `trained`: what each model has been through, which files can hold as well.
    """

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.failing: dict[str, Exception] = {}
        self.bad_models: set[ModelKey] = set()
        self.deadly: set[ModelKey] = set()
        self.large: set[ModelKey] = set()
        self.trained: dict[ModelKey, Trained] = {}
        self.drift = 0.0  # of losses
        self.unreadable: set[str] = set()  # directories of checkpoints
        self.busy_s = 0.0
        self.broken: TrainerError | None = None
        self.restarts = 0
        self.spec = SimpleNamespace(dtype="float32", token_budget=2048)
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.disk = asyncio.Event()  # what is persisted waits for it
        self.disk.set()

    async def _tell(self, what: str, value: Any) -> None:
        self.told.append((what, value))
        await self.go_on.wait()
        if self.broken is None and what in self.failing:
            error = self.failing[what]
            self.broken = error if isinstance(error, TrainerError) else None
            raise error
        if self.broken is not None:
            raise self.broken

    async def restart(self) -> None:
        self.told.append(("restart", None))
        self.restarts += 1
        self.broken = None
        self.trained.clear()

    def note_work(self) -> None:
        """Forget no deaths: here none counts."""

    async def create_model(self, model: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily) -> None:
        await self._tell("create", model)
        self.trained[model] = Trained()

    async def release(self, model: ModelKey) -> None:
        await self._tell("release", model)
        self.trained.pop(model, None)

    async def zero_gradients(self, models: Sequence[ModelKey]) -> None:
        await self._tell("zero", tuple(models))
        for model in models:
            self.trained[model].gradients.clear()

    def prepare(self, items: Sequence[PassItem]) -> Sequence[PassItem]:
        return items

    async def run_pass(self, items: Sequence[PassItem], row_budget: int | None = None) -> PassResult:
        await self._tell("pass", [(item.model, item.backward) for item in items])
        if self.deadly & {item.model for item in items if item.backward}:
            self.broken = TrainerError("rank 0 died in run_pass")
            raise self.broken
        if self.large & {item.model for item in items}:
            return PassResult([Failure("no memory", "server") for _ in items], 1024, exhausted=True)
        return PassResult([self._output(item) for item in items], row_budget or 2048)

    def _output(self, item: PassItem) -> PassOutput | Failure:
        if item.model in self.bad_models:
            return Failure("loss is not finite", "user")
        trained = self.trained[item.model]
        if item.backward:
            trained.gradients.append(item.seq_id)
        loss = float(len(trained.steps)) + self.drift
        return PassOutput(item.request_id, _silent(item), {"loss:sum": loss})

    async def optim_step(self, steps: Sequence[StepItem]) -> list[StepOutput]:
        await self._tell("step", [step.model for step in steps])
        for step in steps:
            trained = self.trained[step.model]
            trained.steps.append(trained.gradients)
            trained.gradients = []
        return [StepOutput(step.request_id, {"grad_norm": 1.0, "bad": float("nan")}) for step in steps]

    async def capture_state(self, model: ModelKey, *, optimizer: bool) -> CapturedSteps:
        await self._tell("capture", model)
        return CapturedSteps(model, copy.deepcopy(self.trained[model].steps))

    async def persist_state(self, captured: CapturedSteps | CapturedExport, directory: str) -> int:
        self.told.append(("persist", captured))
        restarts = self.restarts
        await self.disk.wait()
        if self.restarts != restarts or self.broken is not None:
            raise TrainerError("rank 0 died in persist_state")
        if "persist" in self.failing:
            raise self.failing["persist"]
        if isinstance(captured, CapturedExport):
            write_export(Path(directory))
        else:
            Path(directory).mkdir(parents=True)  # noqa: ASYNC240
            (Path(directory) / STEPS_FILE).write_text(json.dumps(captured.steps))
        return 1

    async def capture_weights(self, durable: Mapping[ModelKey, bool]) -> dict[ModelKey, CapturedWeights]:
        await self._tell("weights", tuple(durable))
        return {model: CapturedWeights(model, copy.deepcopy(self.trained[model].steps)) for model in durable}

    async def capture_export(self, model: ModelKey, shard_bytes: int) -> CapturedExport:
        await self._tell("export", model)
        return CapturedExport(f"export of {model}")

    async def load_state(self, model: ModelKey, directory: str, *, optimizer: bool) -> None:
        await self._tell("load", (model, Path(directory).name))
        if directory in self.unreadable:
            raise UserError(f"checkpoint {directory} is damaged")
        if "snapshots" in directory and not Path(directory).is_dir():  # noqa: ASYNC240
            raise UserError(f"no checkpoint at {directory}")
        file = Path(directory) / STEPS_FILE
        if file.exists():
            self.trained[model] = Trained(json.loads(file.read_text()))

    def names(self) -> list[str]:
        return [what for what, _ in self.told]


def write_export(directory: Path) -> None:
    """Write what the workers write of an export."""
    directory.mkdir(parents=True)
    (directory / ADAPTER_FILE).write_bytes(b"weights")
    (directory / ADAPTER_CONFIG_FILE).write_text('{"base_model_name_or_path": "/nowhere"}')
    files = {name: entry_of(directory / name) for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE)}
    write_manifest(directory, Manifest("/nowhere", LoraSpec(8, 1), 0, None, files))


class World:
    """A journal, the trainer's side of an engine, and its workers."""

    def __init__(
        self,
        store: Store,
        bell: Doorbell,
        root: Path,
        trainer: TrainerGroup | None = None,
        unit_tokens: int = 16384,
        replay_s: float = 1e9,
    ) -> None:
        """`trainer`: a real one in place of the scripted workers. `replay_s`: when snapshots are due."""
        self.store = store
        self.root = root
        self.workers = Workers()
        trainer = trainer or cast(TrainerGroup, self.workers)
        settings = Settings(
            home=root.parent,
            checkpoints=root,
            unit_tokens=unit_tokens,
            replay_s=replay_s,
            snapshot_share=0.99,
            gap_probe_tokens=0,
        )
        metrics = Metrics()
        outbox = Outbox(store, bell, metrics)
        samplers = cast(Samplers, None)
        sampler = SamplerDriver(store, samplers, outbox, 8, metrics)
        spill = make_tmpfs_spill(settings)
        versions = EphemeralVersions(store, samplers, sampler, spill, settings)
        half = compose_training(settings, FACTS, store, outbox, trainer, samplers, versions, metrics)
        self.driver, self.creation = half.driver, half.creation
        self.bell = bell
        self.intake = Intake(store, bell, self.driver, sampler, metrics)
        self.running = asyncio.ensure_future(self._run())
        self.reports: list[str] = []

    async def _run(self) -> None:
        async def report(detail: str) -> None:
            self.reports.append(detail)

        cursor = await self.driver.resume()
        await asyncio.gather(self.driver.run(report), self.intake.run(cursor))

    async def model(self) -> ModelId:
        accepted = await journal.submit_create(self.store, await journal.new_session(self.store))
        assert (await self.done(accepted)).status is FutureStatus.DONE
        assert accepted.model_id is not None
        return accepted.model_id

    async def done(self, accepted: Accepted, within_s: float = 10.0) -> Outcome:
        return await self.until(lambda: journal.outcome(self.store, accepted), _finished, within_s)

    async def until(
        self, look: Callable[[], Awaitable[Any]], enough: Callable[[Any], bool], within_s: float = 10.0
    ) -> Any:
        self.bell.ring("engine")
        async with asyncio.timeout(within_s):
            while not enough(value := await look()):  # noqa: ASYNC110 (another task writes the database)
                await asyncio.sleep(0.01)
        return value


def _finished(outcome: Outcome) -> bool:
    return outcome.status is not FutureStatus.PENDING
