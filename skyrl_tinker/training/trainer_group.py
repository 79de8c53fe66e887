"""The trainer's interface to the engine: one Ray actor per rank behind one async object. Imports no torch."""

import asyncio
import itertools
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.manifest import CheckpointContents
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
from skyrl_tinker.errors import TrainerError, UnitFailedError
from skyrl_tinker.training.actors import Actors
from skyrl_tinker.training.batching.batch import TrainingInputBatch, build_batch
from skyrl_tinker.training.batching.outputs import RankOutput, assemble
from skyrl_tinker.training.captured_state import CapturedState
from skyrl_tinker.training.restart_policy import RestartPolicy
from skyrl_tinker.training.state_ledger import StateLedger
from skyrl_tinker.training.trainer_spec import TrainerSpec, retry_budget

__all__ = ["CapturedState", "PreparedPass", "TrainerGroup", "TrainerSpec"]

INLINE_TOKENS = 2048
"""Most tokens of a batch that Ray sends within the calls (100 KB); more is serialised once for all ranks."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedPass:
    batch: TrainingInputBatch
    argument: Any  # of the call to the ranks: the batch, or if large its ray.ObjectRef


class TrainerGroup:
    """All ranks of the trainer. Methods are awaited from one event loop; units of work run one after another.

    With a `state_dir`, ranks that die are replaced, and every model is then as it was before the unit in
    which they died, to the last bit. The unit is run once more; if they die again, UnitFailedError.
    TrainerError: the group is broken permanently, shut it down and launch another; without a `state_dir` any
    death is of this kind.
    """

    def __init__(self, spec: TrainerSpec, require_ray: Callable[[], None]) -> None:
        self.spec = spec
        self.busy_s = 0.0  # of rank 0, so far
        self.retried_passes = 0  # that ran out of memory or killed a rank, and were run again in smaller rows
        self.restarts = 0  # times that the ranks have been replaced
        self._require_ray = require_ray
        self._ranks = Actors(spec)
        self._ledger = StateLedger()
        self._restart_policy = RestartPolicy()
        self._lost: set[ModelKey] = set()
        self._unreported: set[ModelKey] = set()  # lost models that `take_lost` has not returned yet
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
            raise TrainerError("call ray.init() first: Ray would otherwise start a default cluster")
        if spec.state_dir is not None:  # an earlier trainer's models are lost
            shutil.rmtree(spec.state_dir, ignore_errors=True)
            Path(spec.state_dir).mkdir(parents=True, mode=0o700)
        return cls(spec, require_ray)

    async def ready(self) -> None:
        """Wait until every rank has joined the process group and loaded the base model."""
        await self._ranks.join()
        self._restart_policy.born()

    async def create_model(
        self, model: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily = "adamw"
    ) -> None:
        """Create a model. Raises UserError when a full-parameter copy does not fit into memory."""
        await self._with_retry(lambda: self._on_all_ranks("create_model", model, spec, optimizer))

    def prepare(self, items: Sequence[PassItem]) -> PreparedPass:
        """Build the batch of a pass; call it from a thread when there is much data."""
        batch = build_batch(items)
        large = len(batch.tokens) > INLINE_TOKENS
        return PreparedPass(batch, ray.put(batch) if large else batch)

    async def run_pass(self, prepared: PreparedPass) -> list[PassOutput | Failure]:
        """Run a pass; outputs in the order of the items. Failed requests leave no trace in any gradient."""
        half = retry_budget(self.spec.token_budget)
        try:
            outputs: list[RankOutput] = await self._with_retry(
                lambda: self._on_all_ranks("run_pass", prepared.argument),
                lambda: self._retry_pass(prepared, half),
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
        """Run optimizer steps. A failure in place of an output changed nothing, not even the gradients."""
        try:
            return await self._with_retry(lambda: self._step(steps))
        except UnitFailedError as error:
            return [Failure(str(error), error.category)] * len(steps)

    async def zero_gradients(self, models: Sequence[ModelKey]) -> None:
        known = tuple(model for model in models if model not in self._lost)
        await self._run_or_record(
            lambda: self._on_all_ranks("zero_gradients", known), lambda: self._ledger.drop_gradients(known)
        )

    async def capture_adapters(self, models: Sequence[ModelKey]) -> dict[ModelKey, AdapterWeights]:
        """Return host copies of LoRA models' weights, as read-only arrays."""
        weights: dict[ModelKey, AdapterWeights] = await self._with_retry(
            lambda: self._on_rank_zero("capture_adapters", tuple(models))
        )
        return weights

    async def capture_full(self, model: ModelKey, directory: str) -> None:
        """Stream a full-parameter model's weights to directory/model.safetensors, in the trainer's dtype."""
        await self._with_retry(lambda: self._on_all_ranks("capture_full", model, directory))

    async def save_state(self, model: ModelKey, directory: str, *, optimizer: bool) -> int:
        """Write a checkpoint directory atomically; returns its size in bytes."""
        return await self.persist_state(await self.capture_state(model, optimizer=optimizer), directory)

    async def capture_state(self, model: ModelKey, *, optimizer: bool) -> CapturedState:
        """Copy a model into host memory, as a unit of work. Persisting must follow and frees the copies."""
        return await self._capture("capture_state", model, optimizer)

    async def capture_export(self, model: ModelKey, shard_bytes: int) -> CapturedState:
        """Copy the weights alone, in the layout of PEFT (LoRA) or Hugging Face (full parameters)."""
        return await self._capture("capture_export", model, shard_bytes)

    async def persist_state(self, captured: CapturedState, directory: str) -> int:
        """Write the checkpoint directory while units of work go on, as CapturedState.persist does."""
        return await captured.persist(directory)

    async def load_state(self, model: ModelKey, directory: str, *, optimizer: bool) -> None:
        """Load in place; clears gradients. Raises UserError when the checkpoint does not fit the model."""
        await self._with_retry(lambda: self._on_all_ranks("load_state", model, directory, optimizer))

    async def release(self, model: ModelKey) -> None:
        self._lost.discard(model)
        await self._run_or_record(
            lambda: self._on_all_ranks("release", model), lambda: self._ledger.drop(model)
        )

    async def offload(self) -> None:
        """Move all state to host memory and free the devices; until `onload` only `release` is allowed."""
        try:
            await self._with_retry(lambda: self._on_all_ranks("offload"))
        except UnitFailedError as error:
            raise TrainerError(str(error)) from error
        self._offloaded = True

    async def onload(self) -> None:
        """Move all state back to the devices, to the last bit."""
        self._offloaded = False
        # Fresh ranks start with their state on the devices: nothing to record.
        await self._run_or_record(lambda: self._on_all_ranks("onload"), lambda: None)

    async def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPU of each rank, or nothing on CPU."""
        if self.spec.device != "cuda":
            return ()
        return await self._ranks.gpus()

    async def open_sender(self, factory: Callable[[int], Any], *, every_rank: bool) -> None:
        """Create a weight sender by the picklable `factory(rank)`, in rank 0 or in every rank.

        It has its own thread there: `sender_call` does not wait for units of work, nor they for it.
        """
        self._sender = (factory, every_rank)
        await self._ranks.open_sender(factory, every_rank=every_rank)

    async def sender_call(self, method: str, *args: Any) -> list[Any]:
        """Call the senders; results by rank.

        SamplerError when a sender failed, which leaves the group intact; TrainerError when a rank died, whose
        successor has a fresh sender.
        """
        return await self._ranks.sender_call(method, *args)

    async def ping(self) -> None:
        """Check that all ranks respond, also while a step runs. TrainerError: a rank is dead."""
        await self._ranks.ping()

    async def watch(self, patience_s: float) -> None:
        """Check the ranks once, and replace them if one is dead or has not answered for `patience_s`.

        While the state is offloaded, others may use the devices, so `onload` does it later.
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
            ranks.kill()  # ends a unit that waits for a hanging rank; the unit then replaces them
            async with self._unit:
                if ranks is self._ranks:
                    await self._replace(cause)

    def take_lost(self) -> set[ModelKey]:
        """Return the models that died with a rank since the last call."""
        lost, self._unreported = self._unreported, set()
        return lost

    def pids(self) -> list[int]:
        """Return process ids by rank; empty before `ready`."""
        return list(self._ranks.pids)

    async def shutdown(self) -> None:
        """Kill the ranks, remove their `state_dir`, and wait until their processes are gone."""
        self._ranks.kill()
        if self.spec.state_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self.spec.state_dir, ignore_errors=True)
        await self._ranks.wait_gone()

    # Units

    async def _on_all_ranks(self, method: str, *args: Any) -> list[Any]:
        """Call every rank, and enter the changes in the ledger; values by rank."""
        replies = await self._ranks.call_all(method, *args)
        self._ledger.record([reply.changes for reply in replies])
        self.busy_s += replies[0].seconds
        return [reply.value for reply in replies]

    async def _on_rank_zero(self, method: str, *args: Any) -> Any:
        """Call rank 0 alone, for methods that change nothing."""
        reply = await self._ranks.call(0, method, *args)
        self.busy_s += reply.seconds
        return reply.value

    async def _with_retry(
        self, work: Callable[[], Awaitable[T]], retry: Callable[[], Awaitable[T]] | None = None
    ) -> T:
        """Run a unit of work; if a rank dies, run `retry`, by default the same, on fresh ranks."""
        async with self._unit:
            try:
                return await self._run(work)
            except TrainerError as error:
                await self._replace(error)
            try:
                return await self._run(retry or work)
            except TrainerError as error:
                self._restart_policy.worked()
                await self._replace(error)
                raise UnitFailedError(
                    f"{error}, also when it was run a second time; it changed nothing, and other work goes on"
                ) from error

    async def _run_or_record(self, work: Callable[[], Awaitable[Any]], record: Callable[[], None]) -> None:
        """Run a unit; if a rank dies, `record` its result in the ledger instead, and restore from that."""
        async with self._unit:
            try:
                await self._run(work)
            except TrainerError as error:
                record()
                if not self._offloaded:
                    await self._replace(error)

    async def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        result = await work()
        self._restart_policy.worked()
        return result

    async def _retry_pass(self, prepared: PreparedPass, budget: int) -> list[RankOutput]:
        self._count_retry(prepared)
        return await self._on_all_ranks("run_pass", prepared.argument, budget)

    def _count_retry(self, prepared: PreparedPass) -> None:
        self.retried_passes += 1
        _log.warning("a pass of %d tokens was run again in smaller rows", len(prepared.batch.tokens))

    async def _step(self, steps: Sequence[StepItem]) -> list[StepOutput | Failure]:
        known = tuple(step for step in steps if step.model not in self._lost)
        outputs = iter((await self._on_all_ranks("optim_step", known))[0])
        return [_lost(step.model) if step.model in self._lost else next(outputs) for step in steps]

    async def _capture(self, method: str, model: ModelKey, *args: Any) -> CapturedState:
        number = next(self._captures)
        contents: list[CheckpointContents] = await self._with_retry(
            lambda: self._on_all_ranks(method, model, number, *args)
        )
        return CapturedState(number, contents[0], self._ranks)

    # Deaths

    async def _replace(self, cause: TrainerError) -> None:
        """Replace the ranks, with every model as it was after the last unit that all ranks finished.

        Raises TrainerError when the restart policy gives up.
        """
        if self.spec.state_dir is None:
            raise cause
        self._replacing = True
        try:
            while (failed := await self._try_replace(cause)) is not None:
                cause = failed
        finally:
            self._replacing = False

    async def _try_replace(self, cause: TrainerError) -> TrainerError | None:
        """Replace the ranks once; returns the error if they died again meanwhile."""
        _log.warning("the trainer's processes are replaced: %s", cause)
        self._restart_policy.died(cause)
        self._require_ray()
        self._ranks.kill()
        await self._ranks.wait_gone()
        lost = self._ledger.drop_lost()
        self._lost |= lost
        self._unreported |= lost
        self._ranks = Actors(self.spec)
        try:
            await self._ranks.join()
            await self._ranks.call_all("restore", self._ledger.shares)
            if self._sender is not None:
                await self._ranks.open_sender(self._sender[0], every_rank=self._sender[1])
        except TrainerError as error:
            return error
        self.restarts += 1
        self._restart_policy.born()
        _log.warning("the trainer is up again, with %d models", len(self._ledger.shares))
        return None


def _lost(model: ModelKey) -> Failure:
    return Failure(f"the trainer has no state of model {model}: it was lost when its process died", "server")
