"""The trainer as the engine sees it: one Ray actor per rank behind one async object. No torch here."""

import asyncio
import itertools
import logging
import secrets
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.manifest import CheckpointContents, FileEntry
from skyrl_tinker.domain.values import (
    AdapterWeights,
    Failure,
    Gpu,
    LoraSpec,
    OptimizerFamily,
    PassItem,
    PassOutput,
    StepItem,
    StepOutput,
)
from skyrl_tinker.errors import SkyrlTinkerError, TrainerError, UnitFailedError
from skyrl_tinker.training.actors import Actors
from skyrl_tinker.training.batching.batch import TrainingInputBatch, build_batch
from skyrl_tinker.training.batching.outputs import RankOutput, assemble
from skyrl_tinker.training.restart_policy import RestartPolicy
from skyrl_tinker.training.state_ledger import StateLedger
from skyrl_tinker.training.trainer_spec import TrainerSpec

__all__ = ["CapturedState", "PreparedPass", "TrainerGroup", "TrainerSpec"]

INLINE_TOKENS = 2048
"""Ray carries up to 100 KB in a call itself, which is quicker; more is serialised once for all ranks."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedPass:
    batch: TrainingInputBatch
    argument: Any  # what the ranks are called with: the batch, or if large its ray.ObjectRef


@dataclass(frozen=True, slots=True)
class CapturedState:
    """A model's state in the ranks' host memory until `persist_state` has written it."""

    number: int
    contents: CheckpointContents
    ranks: Actors
    """They must still live then."""


class TrainerGroup:
    """Methods are awaited from one event loop; units of work run one after another.

    With a `state_dir`, ranks that die are replaced, and every model is then as it was before the unit in
    which they died, to the last bit. The unit is run once more; if they die again, UnitFailedError.
    TrainerError: the group is broken for good, shut it down and launch another; so it is at once without a
    `state_dir`.
    """

    def __init__(self, spec: TrainerSpec, require_ray: Callable[[], None]) -> None:
        self.spec = spec
        self.busy_s = 0.0
        """How long rank 0 has worked so far."""
        self.retried_passes = 0
        """Those that ran out of memory or killed a rank, were undone and run again in smaller rows."""
        self.restarts = 0
        """How often the ranks have been replaced."""
        self._require_ray = require_ray
        self._ranks = Actors(spec)
        self._ledger = StateLedger()
        self._lives = RestartPolicy()
        self._lost: set[ModelKey] = set()
        self._untold: set[ModelKey] = set()  # of those
        self._unit = asyncio.Lock()
        self._replacing = False
        self._offloaded = False
        self._sender: tuple[Callable[[int], Any], bool] | None = None
        self._captures = itertools.count()

    @classmethod
    def launch(cls, spec: TrainerSpec, require_ray: Callable[[], None] = lambda: None) -> "TrainerGroup":
        """Start the ranks; returns at once. `require_ray` raises TrainerError when Ray itself is gone.

        Raises TrainerError when Ray is not initialised.
        """
        if not ray.is_initialized():
            raise TrainerError("call ray.init() first: Ray would otherwise start a default cluster by itself")
        if spec.state_dir is not None:  # an earlier trainer's models are lost
            shutil.rmtree(spec.state_dir, ignore_errors=True)
            Path(spec.state_dir).mkdir(parents=True, mode=0o700)
        return cls(spec, require_ray)

    async def ready(self) -> None:
        """Wait until every rank has joined the process group and loaded the base model."""
        await self._ranks.join()
        self._lives.born()

    async def create_model(
        self, model: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily = "adamw"
    ) -> None:
        """Raises UserError when a full-parameter copy does not fit into memory."""
        await self._twice(lambda: self._all("create_model", model, spec, optimizer))

    def prepare(self, items: Sequence[PassItem]) -> PreparedPass:
        """Call it from a thread when there is much data."""
        batch = build_batch(items)
        large = len(batch.tokens) > INLINE_TOKENS
        return PreparedPass(batch, ray.put(batch) if large else batch)

    async def run_pass(self, prepared: PreparedPass) -> list[PassOutput | Failure]:
        """Outputs in the order of the items. Failed requests leave no trace in any gradient."""
        half = max(1, self.spec.token_budget // 2)
        try:
            outputs: list[RankOutput] = await self._twice(
                lambda: self._all("run_pass", prepared.argument), lambda: self._run_again(prepared, half)
            )
        except UnitFailedError as error:
            why = (
                f"{error}. It was tried in rows of {self.spec.token_budget} tokens (token_budget) and of "
                f"{half}: most likely there is too little memory. Send shorter sequences, or fewer at once"
            )
            return [Failure(why, error.category)] * len(prepared.batch.requests)
        if outputs[0].retried:
            self._count_retry(prepared)
        return assemble(prepared.batch, outputs)

    async def optim_step(self, steps: Sequence[StepItem]) -> list[StepOutput | Failure]:
        """What failed without an output changed nothing, the gradients neither."""
        try:
            return await self._twice(lambda: self._step(steps))
        except UnitFailedError as error:
            return [Failure(str(error), error.category)] * len(steps)

    async def zero_gradients(self, models: Sequence[ModelKey]) -> None:
        known = tuple(model for model in models if model not in self._lost)
        await self._surely(
            lambda: self._all("zero_gradients", known), lambda: self._ledger.drop_gradients(known)
        )

    async def capture_adapters(self, models: Sequence[ModelKey]) -> dict[ModelKey, AdapterWeights]:
        """Host copies of LoRA models' weights, read-only arrays."""
        weights: dict[ModelKey, AdapterWeights] = await self._twice(
            lambda: self._first("capture_adapters", tuple(models))
        )
        return weights

    async def capture_full(self, model: ModelKey, directory: str) -> None:
        """Stream a full-parameter model's weights to directory/model.safetensors, in the trainer's dtype."""
        await self._twice(lambda: self._all("capture_full", model, directory))

    async def save_state(self, model: ModelKey, directory: str, *, optimizer: bool) -> int:
        """Write a checkpoint directory atomically; returns its size in bytes."""
        return await self.persist_state(await self.capture_state(model, optimizer=optimizer), directory)

    async def capture_state(self, model: ModelKey, *, optimizer: bool) -> CapturedState:
        """A unit of work: copies in host memory. They stay there until persisted, which must follow."""
        return await self._captured("capture_state", model, optimizer)

    async def capture_export(self, model: ModelKey, shard_bytes: int) -> CapturedState:
        """The same of the weights alone, as PEFT (LoRA) or Hugging Face (full parameters) lays them out."""
        return await self._captured("capture_export", model, shard_bytes)

    async def persist_state(self, captured: CapturedState, directory: str) -> int:
        """Write the checkpoint directory, atomically, while units of work go on; returns its bytes.

        Nothing is left on the disk after StorageError, which names the rank, nor after UnitFailedError: what
        was captured died with a rank.
        """
        target, ranks = Path(directory), captured.ranks
        scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            parts = await ranks.every_disk("persist_state", captured.number, str(scratch))
            files: dict[str, FileEntry] = {name: entry for part in parts for name, entry in part.items()}
            size: int = await ranks.disk(0, "commit_state", captured.contents, files, str(scratch), directory)
        except SkyrlTinkerError as error:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
            if isinstance(error, TrainerError):
                raise UnitFailedError(f"{error}, before the checkpoint was written: save again") from error
            raise
        return size

    async def load_state(self, model: ModelKey, directory: str, *, optimizer: bool) -> None:
        """In place; clears gradients. Raises UserError when the checkpoint does not fit the model."""
        await self._twice(lambda: self._all("load_state", model, directory, optimizer))

    async def release(self, model: ModelKey) -> None:
        self._lost.discard(model)
        await self._surely(lambda: self._all("release", model), lambda: self._ledger.drop(model))

    async def offload(self) -> None:
        """Move all state to host memory and free the devices; until `onload` only `release` goes."""
        try:
            await self._twice(lambda: self._all("offload"))
        except UnitFailedError as error:
            raise TrainerError(str(error)) from error
        self._offloaded = True

    async def onload(self) -> None:
        """Bring it back, to the last bit."""
        self._offloaded = False
        await self._surely(lambda: self._all("onload"), lambda: None)  # fresh ranks have it there

    async def gpus(self) -> tuple[Gpu, ...]:
        """Of each rank; on CPU there is none."""
        if self.spec.device != "cuda":
            return ()
        return await self._ranks.gpus()

    async def open_sender(self, factory: Callable[[int], Any], *, every_rank: bool) -> None:
        """`factory(rank)`, which must be picklable, makes an object in rank 0 or in every rank. It lives in a
        thread of its own there: `sender_call` does not wait for units of work, nor they for it."""
        self._sender = (factory, every_rank)
        await self._ranks.open_sender(factory, every_rank=every_rank)

    async def sender_call(self, method: str, *args: Any) -> list[Any]:
        """By rank. SamplerError when a sender failed, which leaves the group whole; TrainerError when a rank
        died, whose successor has a fresh sender."""
        return await self._ranks.sender_call(method, *args)

    async def ping(self) -> None:
        """Answers while a step runs. TrainerError: a rank is dead."""
        await self._ranks.ping()

    async def watch(self, patience_s: float) -> None:
        """See once whether all ranks live, and replace them if one is dead or has not answered for so long.

        While the state is offloaded the devices may be others', so that `onload` does it then.
        """
        ranks = self._ranks
        if self._replacing or (self._offloaded and self.spec.state_dir is not None):
            return
        try:
            async with asyncio.timeout(patience_s):
                await ranks.ping()
            return
        except TimeoutError:
            cause = TrainerError(f"a trainer process has not answered for {patience_s:.0f} s")
        except TrainerError as error:
            cause = error
        if ranks is self._ranks:
            ranks.kill()  # a unit that waits for one that hangs ends, and sees to the rest
            async with self._unit:
                if ranks is self._ranks:
                    await self._replace(cause)

    def take_lost(self) -> set[ModelKey]:
        """Models that died with a rank since this was last asked."""
        untold, self._untold = self._untold, set()
        return untold

    def pids(self) -> list[int]:
        """Process ids by rank; empty before `ready`."""
        return list(self._ranks.pids)

    async def shutdown(self) -> None:
        """Kill the ranks, remove what they kept, and wait until their processes are gone."""
        self._ranks.kill()
        if self.spec.state_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self.spec.state_dir, ignore_errors=True)
        await self._ranks.gone()

    # Units

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """On every rank, values by rank; what it changed outlives them."""
        answers = await self._ranks.all(method, *args)
        self._ledger.record([answer.changes for answer in answers])
        self.busy_s += answers[0].seconds
        return [answer.value for answer in answers]

    async def _first(self, method: str, *args: Any) -> Any:
        """On rank 0 alone, where it changes nothing."""
        answer = await self._ranks.call(0, method, *args)
        self.busy_s += answer.seconds
        return answer.value

    async def _twice(
        self, work: Callable[[], Awaitable[T]], again: Callable[[], Awaitable[T]] | None = None
    ) -> T:
        """A unit of work, with `again` in its place if it must be run a second time."""
        async with self._unit:
            try:
                return await self._once(work)
            except TrainerError as error:
                await self._replace(error)
            try:
                return await self._once(again or work)
            except TrainerError as error:
                self._lives.worked()
                await self._replace(error)
                raise UnitFailedError(
                    f"{error}, also when it was run a second time; it changed nothing, all else goes on"
                ) from error

    async def _surely(self, work: Callable[[], Awaitable[Any]], enter: Callable[[], None]) -> None:
        """A unit of work that is done, once it is entered so, when ranks that died in it are replaced."""
        async with self._unit:
            try:
                await self._once(work)
            except TrainerError as error:
                enter()
                if not self._offloaded:
                    await self._replace(error)

    async def _once(self, work: Callable[[], Awaitable[T]]) -> T:
        done = await work()
        self._lives.worked()
        return done

    async def _run_again(self, prepared: PreparedPass, budget: int) -> list[RankOutput]:
        self._count_retry(prepared)
        return await self._all("run_pass", prepared.argument, budget)

    def _count_retry(self, prepared: PreparedPass) -> None:
        self.retried_passes += 1
        _log.warning("a pass of %d tokens was run again in smaller rows", len(prepared.batch.tokens))

    async def _step(self, steps: Sequence[StepItem]) -> list[StepOutput | Failure]:
        known = tuple(step for step in steps if step.model not in self._lost)
        outputs = iter((await self._all("optim_step", known))[0])
        return [_lost(step.model) if step.model in self._lost else next(outputs) for step in steps]

    async def _captured(self, method: str, model: ModelKey, *args: Any) -> CapturedState:
        number = next(self._captures)
        contents: list[CheckpointContents] = await self._twice(
            lambda: self._all(method, model, number, *args)
        )
        return CapturedState(number, contents[0], self._ranks)

    # Deaths

    async def _replace(self, cause: TrainerError) -> None:
        """By fresh ranks, with every model as the last unit left it that all ranks finished.

        Raises TrainerError when there is no more hope.
        """
        if self.spec.state_dir is None:
            raise cause
        self._replacing = True
        try:
            while (failed := await self._replaced(cause)) is not None:
                cause = failed
        finally:
            self._replacing = False

    async def _replaced(self, cause: TrainerError) -> TrainerError | None:
        """What went wrong, if they have died again meanwhile."""
        _log.warning("the trainer's processes are replaced: %s", cause)
        self._lives.died(cause)
        self._require_ray()
        self._ranks.kill()
        await self._ranks.gone()
        self._forget_lost()
        self._ranks = Actors(self.spec)
        try:
            await self._ranks.join()
            await self._ranks.all("restore", self._ledger.shares)
            if self._sender is not None:
                await self._ranks.open_sender(self._sender[0], every_rank=self._sender[1])
        except TrainerError as error:
            return error
        self.restarts += 1
        self._lives.born()
        _log.warning("the trainer is up again, with %d models", len(self._ledger.shares))
        return None

    def _forget_lost(self) -> None:
        lost = self._ledger.drop_lost()
        self._lost |= lost
        self._untold |= lost


def _lost(model: ModelKey) -> Failure:
    return Failure(f"the trainer has no state of model {model} any more: it died with its process", "server")
