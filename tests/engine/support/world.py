"""A trainer driver on a real store. The workers are scripted: what they compute does not matter."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

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
from skyrl_tinker.engine.compose import make_trainer_driver
from skyrl_tinker.engine.engine_metrics import Metrics
from skyrl_tinker.engine.intake import Intake
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.parity.drift_monitor import DriftMonitor
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.saves.external_exports import Exporter
from skyrl_tinker.engine.saves.training_saves import Saver
from skyrl_tinker.engine.trainer.model_creation import ModelCreation
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures.outcomes import Outcome
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup
from tests.engine.support import journal

FACTS = BaseModelFacts("/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))


class Workers:
    """Records its calls; fails what `failing` holds."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.failing: dict[str, Exception] = {}
        self.bad_models: set[ModelKey] = set()
        self.step_failure: Failure | None = None
        self.busy_s = 0.0
        self.lost: set[ModelKey] = set()
        self.spec = SimpleNamespace(dtype="float32")
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.disk = asyncio.Event()  # what is persisted waits for it
        self.disk.set()

    async def _tell(self, what: str, value: Any) -> None:
        self.told.append((what, value))
        await self.go_on.wait()
        if what in self.failing:
            raise self.failing[what]

    async def create_model(self, model: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily) -> None:
        await self._tell("create", model)

    async def release(self, model: ModelKey) -> None:
        await self._tell("release", model)

    async def zero_gradients(self, models: Sequence[ModelKey]) -> None:
        await self._tell("zero", tuple(models))

    def prepare(self, items: Sequence[PassItem]) -> Sequence[PassItem]:
        return items

    async def run_pass(self, items: Sequence[PassItem]) -> list[PassOutput | Failure]:
        await self._tell("pass", [(item.model, item.backward) for item in items])
        return [self._output(item) for item in items]

    def _output(self, item: PassItem) -> PassOutput | Failure:
        if item.model in self.bad_models:
            return Failure("loss is not finite", "user")
        return PassOutput(item.request_id, (np.zeros(3, np.float32),), {"loss:sum": 1.0})

    async def optim_step(self, steps: Sequence[StepItem]) -> list[StepOutput | Failure]:
        await self._tell("step", [step.model for step in steps])
        if self.step_failure is not None:
            return [self.step_failure] * len(steps)
        return [StepOutput(step.request_id, {"grad_norm": 1.0, "bad": float("nan")}) for step in steps]

    def take_lost(self) -> set[ModelKey]:
        lost, self.lost = self.lost, set()
        return lost

    async def capture_state(self, model: ModelKey, *, optimizer: bool) -> ModelKey:
        await self._tell("capture", model)
        return model

    async def persist_state(self, captured: ModelKey | str, directory: str) -> int:
        self.told.append(("persist", captured))
        await self.disk.wait()
        if "persist" in self.failing:
            raise self.failing["persist"]
        Path(directory).mkdir(parents=True)  # noqa: ASYNC240
        if isinstance(captured, str):
            _write_adapter(Path(directory))
        return 1

    async def capture_export(self, model: ModelKey, shard_bytes: int) -> str:
        await self._tell("export", model)
        return f"export of {model}"

    async def load_state(self, model: ModelKey, directory: str, *, optimizer: bool) -> None:
        await self._tell("load", (model, Path(directory).name))

    def names(self) -> list[str]:
        return [what for what, _ in self.told]


def _write_adapter(directory: Path) -> None:
    """What the workers write of an export."""
    (directory / ADAPTER_FILE).write_bytes(b"weights")
    (directory / ADAPTER_CONFIG_FILE).write_text('{"base_model_name_or_path": "/nowhere"}')
    files = {name: entry_of(directory / name) for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE)}
    write_manifest(directory, Manifest("/nowhere", LoraSpec(8, 1), 0, None, files))


class World:
    def __init__(
        self,
        store: Store,
        bell: Doorbell,
        root: Path,
        trainer: TrainerGroup | None = None,
        unit_tokens: int = 16384,
    ) -> None:
        """`trainer`: a real one in place of the scripted workers."""
        self.store = store
        self.root = root
        self.workers = Workers()
        trainer = trainer or cast(TrainerGroup, self.workers)
        metrics = Metrics()
        outbox = Outbox(store, bell, metrics)
        saver = Saver(store, trainer, outbox, root)
        self.creation = ModelCreation(store, trainer, FACTS, saver, 64)
        nobody: Any = cast(Any, None)
        gaps = DriftMonitor(store, trainer, nobody, FACTS, metrics, tokens=0, bound=1e-3)
        exporter = Exporter(store, trainer, outbox, FACTS, root)
        self.driver = make_trainer_driver(
            store, trainer, self.creation, saver, exporter, nobody, outbox, unit_tokens, gaps, metrics
        )
        sampler = SamplerDriver(store, cast(Any, None), outbox, 8, metrics)
        self.bell = bell
        self.intake = Intake(store, bell, self.driver, sampler, 0, metrics)
        self.running = asyncio.gather(self.driver.run(), self.intake.run())

    async def model(self) -> ModelId:
        accepted = await journal.submit_create(self.store, await journal.new_session(self.store))
        assert (await self.done(accepted)).status is FutureStatus.DONE
        assert accepted.model_id is not None
        return accepted.model_id

    async def done(self, accepted: Accepted) -> Outcome:
        return await self.until(lambda: journal.outcome(self.store, accepted), _finished)

    async def until(self, look: Callable[[], Awaitable[Any]], enough: Callable[[Any], bool]) -> Any:
        self.bell.ring("engine")
        async with asyncio.timeout(10):
            while not enough(value := await look()):  # noqa: ASYNC110 (another task writes the database)
                await asyncio.sleep(0.01)
        return value


def _finished(outcome: Outcome) -> bool:
    return outcome.status is not FutureStatus.PENDING
