"""Stand-in for TrainerGroup, which computes nothing and knows of each model what it was trained on.

tests/training/test_trainer_promises.py has what it shares with the real one.
"""

import asyncio
import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.manifest import FILE_NAME, Manifest, entry_of, write_listing, write_manifest
from skyrl_tinker.domain.peft_config import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from skyrl_tinker.domain.values import (
    Failure,
    LoraSpec,
    OptimizerFamily,
    PassItem,
    PassOutput,
    StepItem,
    StepOutput,
)
from skyrl_tinker.errors import ExhaustedError, StateLostError, StorageError, TrainerError, UserError
from skyrl_tinker.system.atomic_directory import atomic_directory, make_durable, storage_errors
from skyrl_tinker.training.captured_state import CapturedBytes
from skyrl_tinker.training.trainer_group import PassResult

STEPS_FILE = "steps.json"
WEIGHT = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Steps = list[list[int]]
"""Steps of a model, each with the seq_ids of its passes."""
Ran = tuple[str, Any]
"""Name and argument of a call."""


@dataclass
class Trained:
    """State of a model: its steps, and the passes since the last one."""

    steps: Steps = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class CapturedSteps:
    """Copy of a model's steps on ranks of one life, in `kept` until it is dropped."""

    model: ModelKey
    steps: Steps
    life: int
    kept: list["CapturedSteps"]
    freed: Callable[[int], None]

    async def drop(self) -> None:
        self.freed(id(self))
        with suppress(ValueError):
            self.kept.remove(self)

    def write(self, directory: Path) -> None:
        (directory / STEPS_FILE).write_text(json.dumps(self.steps))


class CapturedWeights(CapturedSteps):
    def write(self, directory: Path) -> None:
        array = np.frombuffer(json.dumps(self.steps).encode(), np.uint8).astype(np.float32)
        (directory / ADAPTER_FILE).write_bytes(save({WEIGHT: array[None]}))


class CapturedExport(CapturedSteps):
    def write(self, directory: Path) -> None:
        (directory / ADAPTER_FILE).write_bytes(b"weights")
        (directory / ADAPTER_CONFIG_FILE).write_text('{"base_model_name_or_path": "/nowhere"}')
        files = {name: entry_of(directory / name) for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE)}
        write_manifest(directory, Manifest("/nowhere", LoraSpec(8, 1), 0, None, files))


def steps_of(adapter: Path) -> Steps:
    """Return the steps that an adapter was captured after. Raises FileNotFoundError."""
    steps: Steps = json.loads(load_file(adapter / ADAPTER_FILE)[WEIGHT].astype(np.uint8).tobytes())
    return steps


def write_steps(directory: Path, steps: Steps) -> None:
    """Write a snapshot of a model that has run these steps."""
    directory.mkdir(parents=True)
    (directory / STEPS_FILE).write_text(json.dumps(steps))


class ScriptedTrainer:
    """Trainer that notes its calls, and does what its fields say.

    `told`: all calls, in order. `ran`: those of each model, as its requests asked for them.
    `go_on`, `disk`: calls of the ranks, and what is persisted, wait for them.
    `failing`: errors by call, of which a TrainerError breaks the ranks.
    `sizes`: bytes of the weights of models to be created, by default 1 each; `moments`: tensors of that size
    that their optimizers have; `most_captured`: bytes of all that was captured at once, so far.
    Models by what their passes come to: `bad_models` fail, for `large` ones there is no memory, of `deadly`
    ones the ranks die. For steps and captures of `short` ones there is no memory, either. Files of
    `unwritable` models cannot be written; `unreadable` directories not be read.
    """

    def __init__(self, trained: dict[ModelKey, Trained] | None = None) -> None:
        """`trained`: models that are there already."""
        self.told: list[Ran] = []
        self.ran: dict[ModelKey, list[Ran]] = {}
        self.failing: dict[str, Exception] = {}
        self.bad_models: set[ModelKey] = set()
        self.deadly: set[ModelKey] = set()
        self.large: set[ModelKey] = set()
        self.short: set[ModelKey] = set()
        self.unwritable: set[ModelKey] = set()
        self.unreadable: set[str] = set()
        self.trained: dict[ModelKey, Trained] = {} if trained is None else trained
        self.kept: list[CapturedSteps] = []
        self.logprob_of: Callable[[ModelKey], float] = lambda model: 0.0
        self.drift = 0.0  # of logprobs
        self.busy_s = 0.0
        self.exhausted_passes = 0
        self.broken: TrainerError | None = None
        self.restarts = 0
        self.spec = SimpleNamespace(dtype="float32", token_budget=2048, resident_models=0)
        self.captured, self.sizes, self.most_captured = CapturedBytes(), dict[ModelKey, int](), 0
        self.captured.most = 1 << 20
        self.moments = 0
        self.go_on, self.disk = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.disk.set()

    def asked(self, what: str) -> list[Any]:
        """Return the arguments of all calls of one kind."""
        return [value for told, value in self.told if told == what]

    def names(self) -> list[str]:
        return [what for what, _ in self.told]

    @property
    def held(self) -> list[ModelKey]:
        """Models of all that was captured and not dropped."""
        return [captured.model for captured in self.kept]

    def follow(self, follower: object) -> None:
        """Tell nobody: there are no replies of ranks."""

    def note_work(self) -> None:
        """Forget no deaths: here none counts."""

    async def restart(self) -> None:
        self.told.append(("restart", None))
        self.restarts += 1
        self.broken = None
        self.trained.clear()

    async def create_model(
        self, model: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily = "adamw"
    ) -> None:
        self._note(model, "create", spec.rank)
        await self._tell("create", model)
        if model in self.trained:
            raise self._break(f"model {model} exists already")
        self.trained[model] = Trained()
        size = self.sizes.get(model, 1)
        self.captured.know(model, size, (1 + self.moments) * size)

    async def release(self, model: ModelKey) -> None:
        with suppress(TrainerError):
            await self._tell("release", model)
        self.trained.pop(model, None)

    def prepare(self, items: Sequence[PassItem]) -> Sequence[PassItem]:
        return items

    async def run_pass(self, items: Sequence[PassItem], row_budget: int | None = None) -> PassResult:
        for item in items:
            tokens = [datum.tokens.tolist() for datum in item.data]
            self._note(item.model, "pass", (item.seq_id, item.backward, tokens))
        await self._tell("pass", [(item.model, item.backward) for item in items])
        if self.deadly & {item.model for item in items if item.backward}:
            raise self._break("rank 0 died in run_pass")
        budget = row_budget or self.spec.token_budget
        if self._too_large(items, budget):
            return PassResult([Failure("no memory", "server") for _ in items], budget, exhausted=True)
        return PassResult([self._output(item) for item in items], budget)

    def _too_large(self, items: Sequence[PassItem], budget: int) -> bool:
        return not self.large.isdisjoint(item.model for item in items)

    def _output(self, item: PassItem) -> PassOutput | Failure:
        if item.model in self.bad_models:
            return Failure("loss is not finite", "user")
        try:
            trained = self._state(item.model)
        except StateLostError as error:
            return Failure(str(error), "server")
        if item.backward:
            trained.gradients.append(item.seq_id)
        logprob, loss = self.logprob_of(item.model) + self.drift, float(len(trained.steps))
        logprobs = (np.full(datum.target_tokens.shape, logprob, np.float32) for datum in item.data)
        return PassOutput(item.request_id, tuple(logprobs), {"loss:sum": loss})

    async def optim_step(self, steps: Sequence[StepItem]) -> list[StepOutput]:
        """Noted by the learning rate, in thousandths."""
        for step in steps:
            self._note(step.model, "step", round(step.params.learning_rate * 1000))
        await self._tell("step", [step.model for step in steps])
        states = [self._state(step.model) for step in steps]
        return [self._step(step, trained) for step, trained in zip(steps, states, strict=True)]

    def _step(self, step: StepItem, trained: Trained) -> StepOutput:
        if step.model in self.short:
            return StepOutput(step.request_id, {}, "no memory", exhausted=True)
        trained.steps.append(trained.gradients)
        trained.gradients = []
        return StepOutput(step.request_id, {"grad_norm": 1.0, "bad": float("nan")})

    async def zero_gradients(self, models: Sequence[ModelKey]) -> None:
        for model in models:
            self._note(model, "zero")
        await self._tell("zero", tuple(models))
        for model in models:
            self._state(model).gradients.clear()

    async def capture_state(self, model: ModelKey, *, optimizer: bool) -> CapturedSteps:
        self._note(model, "save")
        await self._tell("capture", model)
        return self._capture(CapturedSteps, model)

    async def capture_states(
        self, models: Sequence[ModelKey], most_bytes: int
    ) -> dict[ModelKey, CapturedSteps]:
        for model in models:
            self._note(model, "save")
        await self._tell("captures", tuple(models))
        self._state(models[0])
        return {model: self._capture(CapturedSteps, model) for model in models if model in self.trained}

    async def capture_export(self, model: ModelKey, shard_bytes: int) -> CapturedSteps:
        self._note(model, "export")
        await self._tell("export", model)
        return self._capture(CapturedExport, model)

    async def capture_weights(self, durable: Mapping[ModelKey, bool]) -> dict[ModelKey, CapturedSteps]:
        for model in durable:
            self._note(model, "publish")
        await self._tell("weights", dict(durable))
        for model in durable:
            self._state(model)
        if not self.short.isdisjoint(durable):
            raise ExhaustedError("no memory")
        return {model: self._capture(CapturedWeights, model) for model in durable}

    def _capture(self, kind: Callable[..., CapturedSteps], model: ModelKey) -> CapturedSteps:
        steps = copy.deepcopy(self._state(model).steps)
        captured = kind(model, steps, self.restarts, self.kept, self.captured.free)
        self.captured.take(id(captured), self.captured.size(model, optimizer=kind is CapturedSteps))
        self.most_captured = max(self.most_captured, self.captured.held)
        self.kept.append(captured)
        return captured

    async def persist_state(self, captured: CapturedSteps, directory: str) -> int:
        self.told.append(("persist", captured))
        await self.disk.wait()
        self._require_alive(captured)
        size = await self._write(captured, Path(directory))
        try:
            self._require_alive(captured)
        except TrainerError:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise
        return size

    async def _write(self, captured: CapturedSteps, directory: Path) -> int:
        if "persist" in self.failing:
            raise self.failing["persist"]
        if captured.model in self.unwritable:
            raise StorageError("the disk is broken")
        with storage_errors("the checkpoint could not be written"):
            return await asyncio.to_thread(_write, captured, directory)

    async def load_state(self, model: ModelKey, directory: str, *, optimizer: bool) -> None:
        self._note(model, "load", optimizer)
        await self._tell("load", (model, Path(directory).name))
        if directory in self.unreadable:
            raise UserError(f"checkpoint {directory} is damaged")
        if not Path(directory).is_dir():  # noqa: ASYNC240
            raise UserError(f"no checkpoint at {directory}")
        self._state(model)
        file = Path(directory) / STEPS_FILE
        self.trained[model] = Trained(json.loads(file.read_text()) if file.exists() else [])

    def _note(self, model: ModelKey, what: str, value: Any = None) -> None:
        self.ran.setdefault(model, []).append((what, value))

    async def _tell(self, what: str, value: Any) -> None:
        self.told.append((what, value))
        await self.go_on.wait()
        if self.broken is None and what in self.failing:
            error = self.failing[what]
            self.broken = error if isinstance(error, TrainerError) else None
            raise error
        if self.broken is not None:
            raise self.broken

    def _break(self, message: str) -> TrainerError:
        self.broken = TrainerError(message)
        return self.broken

    def _require_alive(self, captured: CapturedSteps) -> None:
        """Raise TrainerError if the ranks that hold it have died."""
        if self.restarts != captured.life or self.broken is not None:
            raise TrainerError("rank 0 died in persist_state")

    def _state(self, model: ModelKey) -> Trained:
        try:
            return self.trained[model]
        except KeyError:
            raise StateLostError(f"the trainer has no state of model {model}") from None


def _write(captured: CapturedSteps, directory: Path) -> int:
    with atomic_directory(directory) as staging:
        captured.write(staging)
        if not (staging / FILE_NAME).exists():
            write_listing(staging)
    return make_durable(directory)
