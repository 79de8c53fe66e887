"""The ranks as Ray actors: start, calls, end. Imports no torch."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from skyrl_tinker.domain.values import Gpu
from skyrl_tinker.errors import (
    RankDiedError,
    SamplerError,
    SkyrlTinkerError,
    StorageError,
    TrainerError,
    UserError,
)
from skyrl_tinker.system.processes import gc_paused, run_nicely
from skyrl_tinker.training.rank_placement import RankPlacement
from skyrl_tinker.training.trainer_spec import TrainerSpec

START_S = 600.0
"""Limit for a rank's process to start and import, which takes minutes from a cold network disk."""
STRAGGLERS_S = 2.0
"""Time that the other ranks get to report their own errors after one rank failed."""
CONCURRENCY = {"ctl": 1, "sync": 2, "checkpoints": 1, "sampler_weights": 1, "drops": 1, "files": 1}
"""Threads of a rank beside its default one, by their group."""
_log = logging.getLogger(__name__)


Writer = Literal["checkpoints", "sampler_weights", "drops"]
"""Thread of a rank that writes files: weights for samplers must not wait for a checkpoint.

`drops`: frees captured copies, without waiting for the writers.
"""


class RankReply(NamedTuple):
    """Reply of one rank to one call, which began at `began_at` (UTC seconds) and took `seconds`."""

    value: Any
    began_at: float
    seconds: float


class RankProcess:
    """Actor of one rank. Collectives run in its one default thread.

    `ping`, the weight sender and the writers have separate threads, so they run during training. The sender
    has two: one may wait for samplers while the other leaves their group.
    """

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        os.environ |= allocator_settings(spec, os.environ)
        worker_class = run_nicely(import_worker, spec.start_niceness)
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._worker = worker_class(spec, rank, address)
        self._rank = rank
        self._sender: Any = None

    def call(self, method: str, *args: Any) -> RankReply:
        began_at, started = time.time(), time.perf_counter()
        value = getattr(self._worker, method)(*args)
        return RankReply(value, began_at, time.perf_counter() - started)

    def write_call(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)

    def file_call(self, method: str, *args: Any) -> Any:
        return getattr(self._worker.files, method)(*args)

    def ping(self) -> int:
        return os.getpid()

    def gpu(self) -> Gpu:
        """Return the GPU that Ray assigned to this rank."""
        return Gpu(ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    def open_sender(self, factory: Callable[[int], Any]) -> None:
        self._sender = factory(self._rank)

    def sender_call(self, method: str, *args: Any) -> Any:
        return getattr(self._sender, method)(*args)

    def open_captured(self, number: int, limit: int) -> Any:
        return self._sender.open_captured(self._worker.captured_share(number), limit)


def import_worker() -> Any:
    """Return its class: torch belongs to a rank's process, not to the engine's."""
    with gc_paused():
        from skyrl_tinker.training.worker import Worker
    return Worker


def allocator_settings(spec: TrainerSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's environment for PyTorch's allocators; the user's settings come last and win.

    Pinned memory is allocated in exact sizes: rounding up to powers of two would take a third more.
    """
    if spec.device != "cuda":
        return {}
    ours = ["pinned_max_round_threshold_mb:1"]
    if spec.expandable_segments:
        ours.append("expandable_segments:True")
    given = inherited.get("PYTORCH_ALLOC_CONF") or inherited.get("PYTORCH_CUDA_ALLOC_CONF")
    return {"PYTORCH_ALLOC_CONF": ",".join([*ours, *([given] if given else [])])}


class Actors:
    """Actors of all ranks, from start to end.

    A rank that died raises RankDiedError, an unexpected failure TrainerError, with rank and cause; all ranks
    are then unusable and must be killed. SkyrlTinkerErrors of a rank are raised unchanged.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        """Take nothing of the cluster until `join`."""
        self._spec = spec
        self._placement = RankPlacement(spec)
        self._actors: tuple[Any, ...] = ()  # by rank; empty before `join`
        self.pids: list[int] = []  # likewise
        self._unshared: dict[int, list[str]] = {}  # directories, by rank; empty before `look_for`
        self._meeting: Any = None  # a MeetingPlace; its module imports torch

    @property
    def spread(self) -> bool:
        """True if some ranks are on other hosts than the engine."""
        return bool(self._placement.far_ranks)

    def apart(self, directory: str) -> list[int]:
        """Return one rank of each host that does not share this directory with the engine's host."""
        return [rank for rank in self._placement.far_hosts if self._is_apart(rank, Path(directory))]

    def _is_apart(self, rank: int, directory: Path) -> bool:
        roots = (self._spec.memory_root, *self._unshared.get(rank, ()))
        return any(directory.is_relative_to(root) for root in roots)

    async def look_for(self, marks: Mapping[str, str]) -> set[str]:
        """Have the ranks of other hosts record the directories that they do not share; return all of these.

        `marks`: for each directory, the name of a file that the engine has created there.
        """
        ranks = self._placement.far_ranks
        found = await _gather(self.file_call(rank, "look_for", marks) for rank in ranks)
        self._unshared = dict(zip(ranks, found, strict=True))
        return {directory for each in found for directory in each}

    async def join(self) -> None:
        """Wait until every rank has joined the process group and loaded the base model.

        Raises NoPlaceError if the cluster has no room for them, TrainerError if a process does not start in
        START_S. Loading has no time limit, as no collective waits for a slow disk.
        """
        places = await self._placement.reserve()
        options: dict[str, Any] = {"concurrency_groups": CONCURRENCY}  # missing in Ray's type hints
        make: Any = ray.remote(**options)(RankProcess)
        self._actors = tuple(
            make.options(**place).remote(self._spec, rank) for rank, place in enumerate(places)
        )
        try:
            async with asyncio.timeout(START_S):
                await self.ping()
        except TimeoutError as error:
            raise TrainerError(f"the trainer's processes did not start within {START_S:.0f} s") from error
        self._meeting = (await self.call(0, "meeting_place", self._placement.hosts)).value
        await self.call_all("join", self._meeting)
        await self.call_all("measure")
        for rank in self._placement.far_hosts:
            await self.file_call(rank, "drop_leftovers")

    async def call(self, rank: int, method: str, *args: Any) -> RankReply:
        call = self._actors[rank].call.remote(method, *args)
        reply: RankReply = await _reply(call, rank, method, TrainerError)
        return reply

    async def call_all(self, method: str, *args: Any) -> list[RankReply]:
        """Make the same call on every rank; replies by rank. A failure ends the wait after STRAGGLERS_S."""
        if len(self._actors) == 1:
            return [await self.call(0, method, *args)]
        tasks = [asyncio.create_task(self.call(rank, method, *args)) for rank in range(len(self._actors))]
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

    async def write_call(self, rank: int, writer: Writer, method: str, *args: Any) -> Any:
        """Call one rank's writer, concurrently with other calls. A failure raises StorageError."""
        call = self._actors[rank].write_call.options(concurrency_group=writer).remote(method, *args)
        return await _reply(call, rank, method, StorageError)

    async def file_call(self, rank: int, method: str, *args: Any) -> Any:
        """Call the HostFiles of one rank, concurrently with other calls. A failure raises StorageError."""
        call = self._actors[rank].file_call.options(concurrency_group="files").remote(method, *args)
        return await _reply(call, rank, method, StorageError)

    async def file_call_all(self, method: str, *args: Any) -> list[Any]:
        """Call the HostFiles of every rank with two more arguments: its number, and the number of ranks."""
        count = len(self._actors)
        return await _gather(self.file_call(rank, method, *args, rank, count) for rank in range(count))

    async def write_call_all(self, writer: Writer, method: str, *args: Any) -> list[Any]:
        ranks = range(len(self._actors))
        return await _gather(self.write_call(rank, writer, method, *args) for rank in ranks)

    async def open_sender(self, factory: Callable[[int], Any]) -> None:
        await self._call_senders("open_sender", factory)

    async def sender_call(self, method: str, *args: Any) -> list[Any]:
        """Call the sender of each rank; replies by rank. A failure raises SamplerError."""
        return await self._call_senders("sender_call", method, *args)

    async def root_call(self, method: str, *args: Any) -> Any:
        """Call the sender of rank 0. A failure raises SamplerError."""
        return await self._call_sender(0, "sender_call", method, *args)

    async def open_captured(self, number: int, limit: int) -> list[Any]:
        """Have each sender open the capture `number` of its rank; replies by rank. Raises SamplerError."""
        return await self._call_senders("open_captured", number, limit)

    async def gpus(self) -> tuple[Gpu, ...]:
        calls = [actor.gpu.options(concurrency_group="ctl").remote() for actor in self._actors]
        return tuple([await _reply(call, rank, "gpu", TrainerError) for rank, call in enumerate(calls)])

    async def ping(self) -> None:
        """Check that every process responds, also while a step runs. Raises RankDiedError.

        There are no processes while the cluster makes room for them.
        """
        calls = [actor.ping.options(concurrency_group="ctl").remote() for actor in self._actors]
        try:
            self.pids = list(await asyncio.gather(*calls))
        except RayError as error:
            _log.error("a trainer process does not answer: %s", error)
            raise RankDiedError("a trainer process died") from error

    def kill(self) -> None:
        """Kill all actors; calls in progress fail. Idempotent."""
        for actor in self._actors:
            ray.kill(actor)
        self._placement.remove()

    async def wait_gone(self) -> None:
        """Wait until killed processes have ended and freed their memory; then remove their meeting place."""
        await self._placement.wait_gone(self.pids)
        if self._meeting is not None:
            self._meeting.remove()

    async def _call_senders(self, remote: str, *args: Any) -> list[Any]:
        return await _gather([self._call_sender(rank, remote, *args) for rank in range(len(self._actors))])

    def _call_sender(self, rank: int, remote: str, *args: Any) -> Coroutine[Any, Any, Any]:
        """Begin the call at once."""
        call = getattr(self._actors[rank], remote).options(concurrency_group="sync").remote(*args)
        method = args[0] if remote == "sender_call" else remote
        return _reply(call, rank, f"sending weights ({method})", SamplerError)


async def _gather(replies: Iterable[Awaitable[Any]]) -> list[Any]:
    """Wait for all replies; if any failed, raise the error that explains the others."""
    results = await asyncio.gather(*replies, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise _root_cause(errors)
    return list(results)


async def _reply(call: Awaitable[Any], rank: int, method: str, fault: type[SkyrlTinkerError]) -> Any:
    """Await one call. Raises RankDiedError for a dead rank, `fault` for any other foreign error."""
    try:
        return await call
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SkyrlTinkerError):
            raise cause from None
        raise fault(f"rank {rank} failed in {method}: {cause!r}") from error
    except RayError as error:
        _log.error("rank %d died in %s: %s", rank, method, error)  # long, with addresses: not for clients
        raise RankDiedError(f"rank {rank} died in {method}: its process ended unexpectedly") from error


def _root_cause(errors: Sequence[BaseException]) -> BaseException:
    """Pick the error to report: a RankDiedError, else a TrainerError, else any but a UserError, else any."""
    kinds = (RankDiedError, TrainerError)
    if broken := [error for kind in kinds for error in errors if isinstance(error, kind)]:
        return broken[0]
    return next((error for error in errors if not isinstance(error, UserError)), errors[0])
