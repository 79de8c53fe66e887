"""The trainer as the engine sees it: one Ray actor per rank behind one async object. No torch here."""

import asyncio
import itertools
import logging
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from skyrl_tinker.errors import SamplerError, SkyrlTinkerError, StorageError, TrainerError, UserError
from skyrl_tinker.manifest import Contents, FileEntry, read_manifest
from skyrl_tinker.training.batch import TrainingInputBatch, build_batch
from skyrl_tinker.training.outputs import RankOutput, assemble
from skyrl_tinker.training.spec import TrainerSpec
from skyrl_tinker.wire.ids import ModelKey
from skyrl_tinker.wire.values import (
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

__all__ = ["CapturedState", "PreparedPass", "TrainerGroup", "TrainerSpec", "read_manifest"]

STRAGGLERS_S = 2.0
"""After one rank failed: how long the others get to tell what they saw, before they are given up."""

EXIT_S = 5.0

INLINE_TOKENS = 2048
"""Ray carries up to 100 KB in a call itself, which is quicker; more is serialised once for all ranks."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedPass:
    batch: TrainingInputBatch
    argument: Any  # what the ranks are called with: the batch, or if large its ray.ObjectRef


@dataclass(frozen=True, slots=True)
class CapturedState:
    """A model's state in the ranks' host memory until `persist_state` has written it."""

    number: int
    contents: Contents


class RankProcess:
    """The actor of one rank. Collectives run in its one default thread.

    `ping` has a thread of its own, the sender of weights another, the writer of checkpoints a third:
    training goes on beside them.
    """

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        from skyrl_tinker.training.worker import Worker  # torch belongs to this process, not to the engine's

        self._worker = Worker(spec, rank)
        self._rank = rank
        self._sender: Any = None

    def call(self, method: str, *args: Any) -> tuple[Any, float]:
        """The method's value, and the seconds that it took."""
        started = time.perf_counter()
        value = getattr(self._worker, method)(*args)
        return value, time.perf_counter() - started

    def disk_call(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)

    def ping(self) -> int:
        return os.getpid()

    def gpu(self) -> Gpu:
        """The one that Ray gave to this rank."""
        return Gpu(ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    def open_sender(self, factory: Callable[[int], Any]) -> None:
        self._sender = factory(self._rank)

    def sender_call(self, method: str, *args: Any) -> Any:
        return getattr(self._sender, method)(*args)


class TrainerGroup:
    """Methods are awaited from one event loop; units of work are awaited one after another.

    A worker's failure raises TrainerError with rank and cause; the group is then broken: shut it down and
    launch another. UserError leaves it whole.
    """

    def __init__(self, spec: TrainerSpec, actors: Sequence[Any]) -> None:
        self.spec = spec
        self._actors = tuple(actors)
        self.busy_s = 0.0
        """How long rank 0 has worked so far."""
        self.retried_passes = 0
        """Those that ran out of memory, were undone and run again in smaller rows."""
        self._pids: list[int] = []
        self._sending: tuple[int, ...] = ()  # ranks that have a sender
        self._captures = itertools.count()

    @classmethod
    def launch(cls, spec: TrainerSpec) -> "TrainerGroup":
        """Start the actors; returns at once. Raises TrainerError when Ray is not initialised."""
        if not ray.is_initialized():
            raise TrainerError("call ray.init() first: Ray would otherwise start a default cluster by itself")
        gpus = 1 if spec.device == "cuda" else 0
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": gpus,
            "concurrency_groups": {"ctl": 1, "sync": 1, "disk": 1},
        }
        actor: Any = ray.remote(**options)(RankProcess)
        return cls(spec, [actor.remote(spec, rank) for rank in range(spec.ranks)])

    async def ready(self) -> None:
        """Wait until every rank has joined the process group and loaded the base model."""
        await self.ping()
        port = await self._call(0, "open_store")
        await self._all("join", port)

    async def create_model(
        self, model: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily = "adamw"
    ) -> None:
        """Raises UserError when a full-parameter copy does not fit into memory."""
        await self._all("create_model", model, spec, optimizer)

    def prepare(self, items: Sequence[PassItem]) -> PreparedPass:
        """Call it from a thread when there is much data."""
        batch = build_batch(items)
        large = len(batch.tokens) > INLINE_TOKENS
        return PreparedPass(batch, ray.put(batch) if large else batch)

    async def run_pass(self, prepared: PreparedPass) -> list[PassOutput | Failure]:
        """Outputs in the order of the items. Failed requests leave no trace in any gradient."""
        outputs: list[RankOutput] = await self._all("run_pass", prepared.argument)
        if outputs[0].retried:
            self.retried_passes += 1
            _log.warning("a pass of %d tokens ran out of memory", len(prepared.batch.tokens))
        return assemble(prepared.batch, outputs)

    async def optim_step(self, steps: Sequence[StepItem]) -> list[StepOutput]:
        outputs: list[list[StepOutput]] = await self._all("optim_step", tuple(steps))
        return outputs[0]

    async def zero_gradients(self, models: Sequence[ModelKey]) -> None:
        await self._all("zero_gradients", tuple(models))

    async def capture_adapters(self, models: Sequence[ModelKey]) -> dict[ModelKey, AdapterWeights]:
        """Host copies of LoRA models' weights, read-only arrays."""
        weights: dict[ModelKey, AdapterWeights] = await self._call(0, "capture_adapters", tuple(models))
        return weights

    async def capture_full(self, model: ModelKey, directory: str) -> None:
        """Stream a full-parameter model's weights to directory/model.safetensors, in the trainer's dtype."""
        await self._all("capture_full", model, directory)

    async def save_state(self, model: ModelKey, directory: str, *, optimizer: bool) -> int:
        """Write a checkpoint directory atomically; returns its size in bytes."""
        return await self.persist_state(await self.capture_state(model, optimizer=optimizer), directory)

    async def capture_state(self, model: ModelKey, *, optimizer: bool) -> CapturedState:
        """A unit of work: copies in host memory. They stay there until persisted, which must follow."""
        number = next(self._captures)
        contents: list[Contents] = await self._all("capture_state", model, number, optimizer)
        return CapturedState(number, contents[0])

    async def persist_state(self, captured: CapturedState, directory: str) -> int:
        """Write the checkpoint directory, atomically, while units of work go on; returns its bytes.

        Raises StorageError that names the rank; nothing is left on the disk then.
        """
        target = Path(directory)
        scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            ranks = range(len(self._actors))
            parts = await _gathered(
                self._disk(rank, "persist_state", captured.number, str(scratch)) for rank in ranks
            )
            files: dict[str, FileEntry] = {name: entry for part in parts for name, entry in part.items()}
            size: int = await self._disk(0, "commit_state", captured.contents, files, str(scratch), directory)
        except SkyrlTinkerError:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
            raise
        return size

    async def load_state(self, model: ModelKey, directory: str, *, optimizer: bool) -> None:
        """In place; clears gradients. Raises UserError when the checkpoint does not fit the model."""
        await self._all("load_state", model, directory, optimizer)

    async def release(self, model: ModelKey) -> None:
        await self._all("release", model)

    async def offload(self) -> None:
        """Move all state to host memory and free the devices; until `onload` only `release` goes."""
        await self._all("offload")

    async def onload(self) -> None:
        """Bring it back, to the last bit."""
        await self._all("onload")

    async def gpus(self) -> tuple[Gpu, ...]:
        """Of each rank; on CPU there is none."""
        if self.spec.device != "cuda":
            return ()
        calls = [actor.gpu.options(concurrency_group="ctl").remote() for actor in self._actors]
        return tuple([await _answer(call, rank, "gpu", TrainerError) for rank, call in enumerate(calls)])

    async def open_sender(self, factory: Callable[[int], Any], *, every_rank: bool) -> None:
        """`factory(rank)`, which must be picklable, makes an object in rank 0 or in every rank. It lives in a
        thread of its own there: `sender_call` does not wait for units of work, nor they for it."""
        self._sending = tuple(range(len(self._actors) if every_rank else 1))
        await self._send_all(lambda actor: actor.open_sender, "open_sender", factory)

    async def sender_call(self, method: str, *args: Any) -> list[Any]:
        """By rank. SamplerError when a sender failed, which leaves the group whole."""
        return await self._send_all(lambda actor: actor.sender_call, method, method, *args)

    async def ping(self) -> None:
        """Answers while a step runs."""
        calls = [actor.ping.options(concurrency_group="ctl").remote() for actor in self._actors]
        try:
            self._pids = list(await asyncio.gather(*calls))
        except RayError as error:
            _log.error("a trainer process does not answer: %s", error)
            raise TrainerError("a trainer process died") from error

    def pids(self) -> list[int]:
        """Process ids by rank; empty before `ready`."""
        return list(self._pids)

    async def shutdown(self) -> None:
        """Kill the actors and wait until their processes are gone."""
        for actor in self._actors:
            ray.kill(actor)
        await asyncio.to_thread(psutil.wait_procs, _processes(self._pids), timeout=EXIT_S)

    async def _call(self, rank: int, method: str, *args: Any) -> Any:
        call = self._actors[rank].call.remote(method, *args)
        value, seconds = await _answer(call, rank, method, TrainerError)
        self.busy_s += seconds if rank == 0 else 0.0
        return value

    async def _disk(self, rank: int, method: str, *args: Any) -> Any:
        call = self._actors[rank].disk_call.options(concurrency_group="disk").remote(method, *args)
        return await _answer(call, rank, method, StorageError)

    async def _send_all(self, pick: Callable[[Any], Any], method: str, *args: Any) -> list[Any]:
        calls = [
            pick(self._actors[rank]).options(concurrency_group="sync").remote(*args) for rank in self._sending
        ]
        named = f"sending weights ({method})"
        return await _gathered(
            _answer(call, rank, named, SamplerError) for rank, call in zip(self._sending, calls, strict=True)
        )

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank, results by rank. One failure does not wait for peers that hang."""
        if len(self._actors) == 1:
            return [await self._call(0, method, *args)]
        tasks = [asyncio.create_task(self._call(rank, method, *args)) for rank in range(len(self._actors))]
        try:
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(pending, timeout=STRAGGLERS_S)
        finally:
            for task in tasks:
                task.cancel()
        ended = [task for task in tasks if task.done() and not task.cancelled()]
        errors = [error for task in ended if (error := task.exception())]
        if errors:
            raise _root_cause(errors)
        return [task.result() for task in tasks]


async def _gathered(answers: Iterable[Awaitable[Any]]) -> list[Any]:
    """All answers; when all have come and some are failures, what explains them."""
    results = await asyncio.gather(*answers, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise _root_cause(errors)
    return list(results)


async def _answer(call: Awaitable[Any], rank: int, method: str, fault: type[SkyrlTinkerError]) -> Any:
    """A rank that died raises TrainerError, any other failure that is not ours `fault`."""
    try:
        return await call
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SkyrlTinkerError):
            raise cause from None
        raise fault(f"rank {rank} failed in {method}: {cause!r}") from error
    except RayError as error:
        _log.error("rank %d died in %s: %s", rank, method, error)  # long, with addresses: not for clients
        raise TrainerError(f"rank {rank} died in {method}: its process ended unexpectedly") from error


def _processes(pids: Sequence[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _root_cause(errors: Sequence[BaseException]) -> BaseException:
    """A death explains its peers' broken connections, so it is told first; a UserError only if all agree."""
    if all(isinstance(error, UserError) for error in errors):
        return errors[0]
    server = [error for error in errors if not isinstance(error, UserError)]
    return next((error for error in server if " died in " in str(error)), server[0])
