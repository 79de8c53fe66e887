"""The trainer's interface to the engine: one Ray actor per rank behind one async object. Imports no torch."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ray

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.manifest import CheckpointContents
from skyrl_tinker.domain.values import (
    Failure,
    Gpu,
    LoraSpec,
    OptimizerFamily,
    PassItem,
    PassOutput,
    StepItem,
    StepOutput,
)
from skyrl_tinker.errors import ExhaustedError, NoPlaceError, TrainerError
from skyrl_tinker.training.actors import Actors, RankReply, Writer
from skyrl_tinker.training.batching.batch import TrainingInputBatch, build_batch
from skyrl_tinker.training.batching.outputs import RankOutput, assemble, own_seconds
from skyrl_tinker.training.captured_state import SHARE, CapturedBytes, CapturedState
from skyrl_tinker.training.far_directory import FarDirectory, look_for_shared
from skyrl_tinker.training.restart_policy import RestartPolicy
from skyrl_tinker.training.trainer_spec import TrainerSpec

__all__ = ["CapturedState", "PassResult", "PreparedPass", "TrainerGroup", "TrainerSpec"]

INLINE_TOKENS = 2048
"""Most tokens of a batch that Ray sends within the calls (100 KB); more is serialised once for all ranks."""
NOT_RUNNING = "the trainer's processes are not running"
T = TypeVar("T")
Follower = Callable[[str, Sequence[RankReply]], None]
"""(method, replies by rank): called after each call that all ranks have answered."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedPass:
    batch: TrainingInputBatch
    argument: Any  # of the call to the ranks: the batch, or if large its ray.ObjectRef


@dataclass(frozen=True, slots=True)
class PassResult:
    """Outputs in the order of the items, and the tokens per row with which the pass ran.

    `exhausted`: memory ran out, and all items failed. `own_s`: seconds of each request's custom loss.
    """

    outputs: list[PassOutput | Failure]
    row_budget: int
    exhausted: bool = False
    own_s: Mapping[RequestId, float] = field(default_factory=dict)


class TrainerGroup:
    """All ranks of the trainer. Methods are awaited from one event loop, units of work one after another.

    Concurrent calls also run one after another, in the same order on all ranks.
    TrainerError: a rank died, hangs or failed unexpectedly, and all models are lost. Until `restart` has
    started fresh ranks, without models, every unit raises the same error.
    """

    def __init__(self, spec: TrainerSpec, require_ray: Callable[[], None]) -> None:
        self.spec = spec
        self.busy_s = 0.0  # of rank 0, so far
        self.exhausted_passes = 0  # that ran out of memory
        self.restarts = 0  # times that the ranks have been replaced
        self.broken: TrainerError | None = TrainerError(NOT_RUNNING)
        """Why there are no ranks, or what ended them."""
        self._require_ray = require_ray
        self._ranks = Actors(spec)
        self._ended = False
        self._restart_policy = RestartPolicy()
        self._followers: list[Follower] = []
        self._sender: Callable[[int], Any] | None = None
        self._directories: Sequence[Path] = ()
        self._captures = itertools.count()
        self.captured = CapturedBytes()

    @classmethod
    def launch(cls, spec: TrainerSpec, require_ray: Callable[[], None] = lambda: None) -> "TrainerGroup":
        """Prepare the ranks, which `ready` starts.

        `require_ray` raises TrainerLostError when Ray itself is gone. Raises TrainerError when Ray is not
        initialised.
        """
        if not ray.is_initialized():
            raise TrainerError("call ray.init() first: Ray would otherwise start a default cluster")
        return cls(spec, require_ray)

    def follow(self, follower: Follower) -> None:
        """Call `follower` after each call of the ranks from now on; it must return at once."""
        self._followers.append(follower)

    async def ready(self) -> None:
        """Start the ranks; return once each has joined the process group and loaded the base model.

        After `shutdown`, these are fresh ranks, whose deaths count anew.
        """
        if self._ended:
            self._ranks, self._ended = Actors(self.spec), False
            self._restart_policy = RestartPolicy()
        await self._come_up()

    async def look_for_shared(self, directories: Sequence[Path]) -> None:
        """Find the ranks whose hosts do not share `directories` with this process, now and at each restart.

        Files that such ranks write there are copied here, and files that they read are copied to them.
        """
        self._directories = directories
        await look_for_shared(self._ranks, directories)

    async def restart(self) -> None:
        """Replace broken ranks by fresh ones, which have the base model and nothing else.

        Raises TrainerError when these die at once, or have no place: try again. TrainerLostError: another try
        does not help.
        """
        assert self.broken is not None, "the ranks are well"
        _log.warning("the trainer's processes are replaced: %s", self.broken)
        if not isinstance(self.broken, NoPlaceError):
            self._restart_policy.died(self.broken)
        self._require_ray()
        self._ranks.kill()
        await self._ranks.wait_gone()
        self._ranks = Actors(self.spec)
        self.restarts += 1
        try:
            await self._come_up()
        except TrainerError as error:
            self.broken = error
            raise

    async def create_model(
        self, model: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily = "adamw"
    ) -> None:
        """Create a model.

        Raises UserError when a full-parameter copy would not fit into memory, ExhaustedError when it ran out.
        """
        try:
            sizes, *_ = await self._on_all_ranks("create_model", model, spec, optimizer)
        except ExhaustedError:
            await self.release(model)  # by ranks that had the memory
            raise
        self.captured.know(model, *sizes)

    def prepare(self, items: Sequence[PassItem]) -> PreparedPass:
        """Build the batch of a pass; call it from a thread when there is much data."""
        batch = build_batch(items)
        large = len(batch.tokens) > INLINE_TOKENS
        return PreparedPass(batch, ray.put(batch) if large else batch)

    async def run_pass(self, prepared: PreparedPass, row_budget: int | None = None) -> PassResult:
        """Run a pass in rows of `row_budget` tokens, by default that of the spec.

        Failed requests leave no trace in any gradient.
        """
        budget = row_budget or self.spec.token_budget
        outputs: list[RankOutput] = await self._on_all_ranks("run_pass", prepared.argument, budget)
        self.exhausted_passes += outputs[0].exhausted
        own_s = own_seconds(prepared.batch, outputs)
        return PassResult(assemble(prepared.batch, outputs), budget, outputs[0].exhausted, own_s)

    async def optim_step(self, steps: Sequence[StepItem]) -> list[StepOutput]:
        """Run optimizer steps of several models; outputs in their order. `exhausted` ones can be repeated."""
        outputs: list[StepOutput] = (await self._on_all_ranks("optim_step", tuple(steps)))[0]
        return outputs

    async def zero_gradients(self, models: Sequence[ModelKey]) -> None:
        await self._on_all_ranks("zero_gradients", tuple(models))

    async def capture_weights(self, durable: Mapping[ModelKey, bool]) -> dict[ModelKey, CapturedState]:
        """Copy several models' weights for samplers into host memory, as one unit of work.

        Weights that are not `durable` have no manifest, and the trainer's dtype even for adapters. Raises
        StateLostError, with nothing captured, if the trainer does not have one of the models.
        """
        numbers = {model: next(self._captures) for model in durable}
        contents, *_ = await self._on_all_ranks("capture_weights", numbers, durable)
        return {
            model: self._taken(model, number, contents[model], "sampler_weights", optimizer=False)
            for model, number in numbers.items()
        }

    async def capture_state(self, model: ModelKey, *, optimizer: bool) -> CapturedState:
        """Copy a model into host memory, as a unit of work; `CapturedState.drop` frees the copies."""
        return await self._capture("capture_state", model, optimizer, optimizer=optimizer)

    async def capture_states(
        self, models: Sequence[ModelKey], most_bytes: int
    ) -> dict[ModelKey, CapturedState]:
        """Copy models with their optimizer state, as one unit of work: the first, and others that fit.

        `most_bytes`: limit of all copies together. If memory runs out, the copies end there; an error of the
        first one is raised.
        """
        numbers = {model: next(self._captures) for model in models}
        contents, *_ = await self._on_all_ranks("capture_states", numbers, most_bytes)
        return {
            model: self._taken(model, numbers[model], each, optimizer=True)
            for model, each in contents.items()
        }

    async def capture_export(self, model: ModelKey, shard_bytes: int) -> CapturedState:
        """Copy the weights alone, in the layout of PEFT (LoRA) or Hugging Face (full parameters)."""
        return await self._capture("capture_export", model, shard_bytes, optimizer=False)

    async def persist_state(self, captured: CapturedState, directory: str) -> int:
        """Write the checkpoint directory while units of work go on, as CapturedState.persist does."""
        with self._broken_by_failures_of(captured.ranks):
            return await captured.persist(directory)

    async def load_state(self, model: ModelKey, directory: str, *, optimizer: bool) -> None:
        """Load in place; clears gradients. Raises UserError when the checkpoint does not fit the model.

        StorageAwayError: another host cannot store it now, and the model is unchanged.
        """
        ranks = self._ranks
        elsewhere = FarDirectory(ranks, directory)
        try:
            with self._broken_by_failures_of(ranks):
                await elsewhere.carry()
                await ranks.file_call_all("verify", directory)
            await self._on_all_ranks("load_state", model, directory, optimizer)
        finally:
            await elsewhere.drop()

    async def release(self, model: ModelKey) -> None:
        """Forget a model; on broken ranks there is none."""
        self.captured.forget(model)
        await self._on_ranks_that_live("release", model)

    async def offload(self) -> None:
        """Move all state to host memory and free the devices; until `onload` only `release` is allowed."""
        if not await self._on_ranks_that_live("offload"):
            self._ranks.kill()  # which frees the devices, too
            await self._ranks.wait_gone()

    async def onload(self) -> None:
        """Move all state back to the devices, to the last bit; without the memory, the next unit retries."""
        try:
            await self._on_ranks_that_live("onload")
        except ExhaustedError as error:
            _log.warning("the trainer's state is not on its devices: %s", error)

    async def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPU of each rank, or nothing on CPU."""
        if self.spec.device != "cuda":
            return ()
        return await self._ranks.gpus()

    async def open_sender(self, factory: Callable[[int], Any]) -> None:
        """Create a weight sender in every rank, by the picklable `factory(rank)`.

        It has its own threads there: `sender_call` does not wait for units of work, nor they for it.
        """
        self._sender = factory
        if self.broken is not None:
            raise self.broken
        await self._ranks.open_sender(factory)

    async def sender_call(self, method: str, *args: Any) -> list[Any]:
        """Call the senders; results by rank.

        SamplerError when a sender failed, which leaves the ranks intact; TrainerError when a rank died: fresh
        ranks have fresh senders.
        """
        return await self._on_senders(lambda ranks: ranks.sender_call(method, *args))

    async def root_call(self, method: str, *args: Any) -> Any:
        """Call the sender of rank 0, as `sender_call` does."""
        return await self._on_senders(lambda ranks: ranks.root_call(method, *args))

    async def watch(self, patience_s: float) -> None:
        """Check the ranks once; they are broken if one is dead or has not answered for `patience_s`.

        A unit that waits for a hanging rank ends then with TrainerError. Ranks that have never answered are
        left to `restart`: on a busy host a process may take long to start.
        """
        ranks = self._ranks
        if not ranks.pids:
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
            self.broken = self.broken or cause
            ranks.kill()

    def note_work(self) -> None:
        """Tell the restart policy that a unit of new work has ended."""
        self._restart_policy.worked()

    def pids(self) -> list[int]:
        """Return process ids by rank; empty before `ready`."""
        return list(self._ranks.pids)

    async def shutdown(self) -> None:
        """Kill the ranks and wait until their processes are gone."""
        self.broken = self.broken or TrainerError(NOT_RUNNING)
        self._ended = True
        self._ranks.kill()
        await self._ranks.wait_gone()

    async def _come_up(self) -> None:
        """Wait for the ranks, and bound what is captured by their hosts, which may be others than before."""
        await self._ranks.join()
        memory = [reply.value for reply in await self._ranks.call_all("host_memory")]
        self.captured.most = min(memory) // SHARE
        await self.look_for_shared(self._directories)
        if self._sender is not None:
            await self._ranks.open_sender(self._sender)
        self.broken = None
        self._restart_policy.born()

    async def _on_senders(self, call: Callable[[Actors], Awaitable[T]]) -> T:
        if self.broken is not None:
            raise self.broken
        ranks = self._ranks
        with self._broken_by_failures_of(ranks):
            return await call(ranks)

    @contextmanager
    def _broken_by_failures_of(self, ranks: Actors) -> Iterator[None]:
        """Record a TrainerError of the block, unless these ranks have been replaced meanwhile."""
        try:
            yield
        except TrainerError as error:
            if ranks is self._ranks:
                self.broken = self.broken or error
            raise

    async def _on_all_ranks(self, method: str, *args: Any) -> list[Any]:
        """Call every rank; values by rank. Raises TrainerError once the ranks are broken."""
        if self.broken is not None:
            raise self.broken
        try:
            replies = await self._ranks.call_all(method, *args)
        except TrainerError as error:
            self.broken = self.broken or error
            raise
        self.busy_s += replies[0].seconds
        for follower in self._followers:
            follower(method, replies)
        return [reply.value for reply in replies]

    async def _on_ranks_that_live(self, method: str, *args: Any) -> bool:
        """Make a call that has no meaning for broken ranks; returns False if they are broken."""
        try:
            await self._on_all_ranks(method, *args)
        except TrainerError:
            return False
        return True

    async def _capture(self, method: str, model: ModelKey, *args: Any, optimizer: bool) -> CapturedState:
        number = next(self._captures)
        contents: list[CheckpointContents] = await self._on_all_ranks(method, model, number, *args)
        return self._taken(model, number, contents[0], optimizer=optimizer)

    def _taken(
        self,
        model: ModelKey,
        number: int,
        contents: CheckpointContents,
        writer: Writer = "checkpoints",
        *,
        optimizer: bool,
    ) -> CapturedState:
        self.captured.take(number, self.captured.size(model, optimizer=optimizer))
        return CapturedState(number, contents, self._ranks, self.captured, writer)
