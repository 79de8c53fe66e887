"""The ranks as Ray actors: their start, calls to them, and their end. No torch here."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil
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
from skyrl_tinker.training.state_ledger import Changes
from skyrl_tinker.training.trainer_spec import TrainerSpec

STRAGGLERS_S = 2.0
"""After one rank failed: how long the others get to tell what they saw, before they are given up."""

EXIT_S = 5.0
_log = logging.getLogger(__name__)


class RankReply(NamedTuple):
    """`seconds`: that the rank took. `changes`: what outlives it of what the call changed."""

    value: Any
    seconds: float
    changes: Changes


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

    def call(self, method: str, *args: Any) -> RankReply:
        started = time.perf_counter()
        self._worker.mirror.begin()
        value = getattr(self._worker, method)(*args)
        changes = self._worker.mirror.finish()
        return RankReply(value, time.perf_counter() - started, changes)

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


class Actors:
    """Those of all ranks, from their start to their end.

    A rank that died, or failed as nobody foresaw, raises TrainerError with rank and cause; the ranks are
    then broken, all of them: end them. SkyrlTinkerErrors of a rank are raised as they are.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        """Start them; returns at once."""
        gpus = 1 if spec.device == "cuda" else 0
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": gpus,
            "concurrency_groups": {"ctl": 1, "sync": 1, "disk": 1},
        }
        actor: Any = ray.remote(**options)(RankProcess)
        self._actors = tuple(actor.remote(spec, rank) for rank in range(spec.ranks))
        self._sending: tuple[int, ...] = ()  # ranks that have a sender
        self.pids: list[int] = []
        """By rank; empty before `join`."""

    async def join(self) -> None:
        """Wait until every rank has joined the process group and loaded the base model."""
        await self.ping()
        port = (await self.call(0, "open_store")).value
        await self.all("join", port)

    async def call(self, rank: int, method: str, *args: Any) -> RankReply:
        call = self._actors[rank].call.remote(method, *args)
        answer: RankReply = await _answer(call, rank, method, TrainerError)
        return answer

    async def all(self, method: str, *args: Any) -> list[RankReply]:
        """The same call on every rank, answers by rank. One failure does not wait for peers that hang."""
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

    async def disk(self, rank: int, method: str, *args: Any) -> Any:
        """Beside other calls. A failure raises StorageError."""
        call = self._actors[rank].disk_call.options(concurrency_group="disk").remote(method, *args)
        return await _answer(call, rank, method, StorageError)

    async def every_disk(self, method: str, *args: Any) -> list[Any]:
        return await _gathered(self.disk(rank, method, *args) for rank in range(len(self._actors)))

    async def open_sender(self, factory: Callable[[int], Any], *, every_rank: bool) -> None:
        self._sending = tuple(range(len(self._actors) if every_rank else 1))
        await self._send_all(lambda actor: actor.open_sender, "open_sender", factory)

    async def sender_call(self, method: str, *args: Any) -> list[Any]:
        """By rank. A failure raises SamplerError."""
        return await self._send_all(lambda actor: actor.sender_call, method, method, *args)

    async def gpus(self) -> tuple[Gpu, ...]:
        calls = [actor.gpu.options(concurrency_group="ctl").remote() for actor in self._actors]
        return tuple([await _answer(call, rank, "gpu", TrainerError) for rank, call in enumerate(calls)])

    async def ping(self) -> None:
        """Answers while a step runs."""
        calls = [actor.ping.options(concurrency_group="ctl").remote() for actor in self._actors]
        try:
            self.pids = list(await asyncio.gather(*calls))
        except RayError as error:
            _log.error("a trainer process does not answer: %s", error)
            raise RankDiedError("a trainer process died") from error

    def kill(self) -> None:
        """Idempotent. Calls under way fail."""
        for actor in self._actors:
            ray.kill(actor)

    async def gone(self) -> None:
        """Killed ones may take a moment to give their memory back."""
        await asyncio.to_thread(psutil.wait_procs, _processes(self.pids), timeout=EXIT_S)

    async def _send_all(self, pick: Callable[[Any], Any], method: str, *args: Any) -> list[Any]:
        calls = [
            pick(self._actors[rank]).options(concurrency_group="sync").remote(*args) for rank in self._sending
        ]
        named = f"sending weights ({method})"
        return await _gathered(
            _answer(call, rank, named, SamplerError) for rank, call in zip(self._sending, calls, strict=True)
        )


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
        raise RankDiedError(f"rank {rank} died in {method}: its process ended unexpectedly") from error


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
    return next((error for error in server if isinstance(error, RankDiedError)), server[0])
