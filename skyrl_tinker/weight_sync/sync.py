"""Sync of full parameters to all replicas: its phases, and which replicas a failure loses.

Nothing is restored. A replica that may hold a mixture of old and new weights is lost: in the middle of an
update it keeps a layer's first shards, and would mix them with the old ones.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from skyrl_tinker.errors import SamplerError, SkyrlTinkerError, TrainerError
from skyrl_tinker.weight_sync.transport import (
    Message,
    Replica,
    SyncPhase,
    WeightSource,
    WeightSyncError,
    WeightTransport,
    WeightUpdateTarget,
)

PATIENCE_S = 300.0
"""Limit for one answer of one replica: loading large weights may take minutes."""
QUICK_S = 60.0
"""Limit for calls that load nothing, yet wait for a step of the model: others stand paused meanwhile."""
STRAGGLERS_S = 5.0
"""Limit for calls after a failure: for the trainer to leave, and for replicas that are lost anyway."""
PARTIAL = "partial"
"""Version of a replica that holds part of an update. It outlives this process."""
DISCARD: Message = {"discard": True}
"""Update that ends the session of a staged transport; workers answer it with an error on purpose."""

K = TypeVar("K")
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Synced:
    """Figures of one sync. `paused_s`: seconds during which requests were paused.

    `lost`: by URL, errors of replicas that failed when others already served the new weights: replace them.
    """

    size: int  # bytes
    seconds: float
    paused_s: float
    lost: Mapping[str, BaseException]


async def sync_weights(
    control: WeightUpdateTarget,
    transport: WeightTransport,
    source: WeightSource,
    version: str,
    *,
    awake: bool = True,
    keep_cache: bool = False,
) -> Synced:
    """Make the replicas of `control` serve the weights of `source` as `version`.

    Requests are paused as briefly as the transport can, then continue with the new weights and nothing cached
    from the old. Raises WeightSyncError, naming phase and replicas: no replica serves the new weights, and
    all but the lost ones serve the old. One sync at a time per transport. Replicas that are not `awake` stay
    paused before and after: their caches must wake first. `keep_cache`: running requests keep their keys and
    values from the old weights, which others must not reuse (cache_salt).
    """
    if not control.server_urls:
        raise SamplerError("no sampler is running")
    update = _Update(
        {url: control.replica(url) for url in control.server_urls}, transport, awake, keep_cache and awake
    )
    try:
        return await update.run(source, version)
    except BaseException as error:  # cancellation included: samplers must not stay between two versions
        lost = await update.undo()
        if isinstance(error, Exception):
            raise await update.explain(error, version, lost) from error
        raise


class _Update:
    def __init__(
        self, replicas: Mapping[str, Replica], transport: WeightTransport, awake: bool, keep_cache: bool
    ) -> None:
        self._replicas = replicas
        self._transport = transport
        self._awake = awake
        self._keep_cache = keep_cache
        self._phase: SyncPhase = "open"
        self._failures: Mapping[str, BaseException] = {}
        self._first: Sequence[str] = ()  # the first replicas that failed
        self._paused_at: float | None = None
        self._spoiled = False  # replicas may hold part of the new weights
        self._joining = False  # a group that no replica can leave before all have joined
        self._stuck: Sequence[str] = ()  # in such a group

    async def run(self, source: WeightSource, version: str) -> Synced:
        began = time.monotonic()
        staged = self._transport.staged
        try:
            chunks = await self._transport.open(source)
            await self._form()
            message = await self._load(0)
            if not staged:
                await self._pause()
            self._spoiled = not staged
            await self._call_all("start", self._start)
            await self._send(message)
            for index in range(1, len(chunks)):
                await self._send(await self._load(index))
            if staged:
                await self._pause()
            lost = await self._finish(version)
            ended = time.monotonic()
        finally:  # if it fails the trainer is dead, which the engine notices
            await _try_all([self._transport.close], STRAGGLERS_S)
        assert self._paused_at is not None
        size = sum(chunk.size for chunk in chunks)
        return Synced(size, ended - began, ended - self._paused_at, lost)

    async def undo(self) -> tuple[str, ...]:
        """Let the replicas go on with the old weights; return those that cannot."""
        await self._leave()
        if self._spoiled:
            return tuple(self._replicas)
        if self._stuck:
            return tuple(self._stuck)
        back = await asyncio.gather(*map(self._restore, self._replicas.values()))
        return tuple(url for url, done in zip(self._replicas, back, strict=True) if not done)

    async def _restore(self, replica: Replica) -> bool:
        """Let a replica go on with the old weights, whatever the others do; return whether it does."""
        await _try_all([partial(replica.update_weights, DISCARD)], QUICK_S)
        return self._paused_at is None or not self._awake or await _try_all([replica.resume], QUICK_S)

    async def explain(self, error: Exception, version: str, lost: tuple[str, ...]) -> WeightSyncError:
        """Make the error. If replicas are dead only these are named: they explain the others' failures."""
        failures = {} if isinstance(error, TrainerError) else self._failures
        dead = [url for url in failures if not await _try_all([self._replicas[url].health], STRAGGLERS_S)]
        named = dead or [url for url in self._first if url in failures]
        causes = "; ".join(f"{url}: {failures[url]}" for url in named) or str(error) or repr(error)
        text = f"weights {version} are not served: {self._phase} failed: {causes}"
        if lost:
            text += f"; to be replaced: {', '.join(lost)}"
        return WeightSyncError(text, self._phase, named, lost)

    async def _form(self) -> None:
        self._phase = "init"
        if self._transport.members == tuple(self._replicas):
            return
        workers = await self._call_all("init", self._leave_former_group, patience_s=QUICK_S)
        messages = dict(zip(self._replicas, await self._transport.form(workers), strict=True))
        self._joining = not self._transport.staged
        await self._call_all(
            "init",
            lambda url: self._replicas[url].init_weight_transfer_engine(messages[url]),
            self._transport.meet(),
        )
        self._joining = False
        self._transport.members = tuple(self._replicas)

    async def _leave_former_group(self, url: str) -> int:
        """Free a replica's side of the group, as a new one replaces it unfreed; count its workers."""
        replica = self._replicas[url]
        try:
            await replica.shutdown_weight_transfer_engine()
        except SamplerError:  # refused in an update, which an engine that died may have left open
            if not self._transport.staged:
                raise
            await _try_all([partial(replica.update_weights, DISCARD)])
            await replica.shutdown_weight_transfer_engine()
        return await replica.world_size()

    async def _start(self, url: str) -> None:
        if self._spoiled:
            await self._replicas[url].set_weight_version(PARTIAL)
        await self._replicas[url].start_weight_update()

    async def _load(self, index: int) -> Message:
        self._phase = "update"
        return await self._transport.load(index)

    async def _send(self, message: Message) -> None:
        await self._call_all(
            "update", lambda url: self._replicas[url].update_weights(message), self._transport.send()
        )

    async def _pause(self) -> None:
        self._paused_at = time.monotonic()
        await self._call_all("pause", self._stand_still, patience_s=QUICK_S)

    async def _stand_still(self, url: str) -> None:
        """Pause a replica. If its weights change chunk by chunk, also stop its steps and drop its cache.

        SGLang may have a step in progress until its requests are retracted.
        """
        replica = self._replicas[url]
        await replica.pause("keep", clear_cache=False)
        if not self._transport.staged and not self._keep_cache:
            await replica.reset_prefix_cache()

    async def _finish(self, version: str) -> Mapping[str, BaseException]:
        """Have each replica serve the new weights; return the errors by URL. Raises one if all failed."""
        self._phase = "finish"
        self._spoiled = True
        results = await asyncio.gather(
            *(_answer(partial(self._serve, url, version)) for url in self._replicas), return_exceptions=True
        )
        named = zip(self._replicas, results, strict=True)
        failures = {url: result for url, result in named if result is not None}
        if len(failures) == len(results):
            self._failures, self._first = failures, tuple(failures)
            raise next(iter(failures.values()))
        return failures

    async def _serve(self, url: str, version: str) -> None:
        """Let a replica go on with the new weights; keys and values are computed again unless kept."""
        replica = self._replicas[url]
        calls: list[Awaitable[None]] = [replica.finish_weight_update(version)]
        if self._transport.staged and not self._keep_cache:
            calls.insert(0, replica.reset_prefix_cache())  # beside the loading of the weights
        ended = await asyncio.gather(*calls, return_exceptions=True)
        for error in (result for result in ended if result is not None):
            raise error
        if self._awake:
            await replica.resume()

    async def _call_all(
        self,
        phase: SyncPhase,
        call: Callable[[str], Awaitable[T]],
        trainers: Coroutine[Any, Any, None] | None = None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> list[T]:
        """Make the same call to every replica concurrently, while the trainer does its part.

        At the first failure the trainer leaves, so that no replica waits for the failed ones. Then all calls
        run to their end, so that none has an effect later, except those of lost replicas. Replicas that still
        wait in NCCL, which has no timeout, for a missing member are lost.
        """
        self._phase = phase
        calls = {
            url: asyncio.ensure_future(_answer(partial(call, url), patience_s)) for url in self._replicas
        }
        tasks: list[asyncio.Future[Any]] = [*calls.values()]
        if trainers is not None:
            tasks.append(asyncio.ensure_future(trainers))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._first = tuple(_failures(calls))
            if not all(task.done() and not task.exception() for task in tasks):
                await self._break_off(calls, tasks)
        self._failures = _failures(calls)
        errors = _failures(dict(enumerate(reversed(tasks))))  # the trainer's error explains the replicas'
        if errors:
            raise next(iter(errors.values()))
        return [task.result() for task in calls.values()]

    async def _break_off(
        self, calls: Mapping[str, asyncio.Future[Any]], tasks: Sequence[asyncio.Future[Any]]
    ) -> None:
        await self._leave()
        await asyncio.wait(tasks, timeout=STRAGGLERS_S if self._spoiled or self._joining else None)
        if self._joining:
            self._stuck = [url for url, call in calls.items() if not call.done()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _leave(self) -> None:
        await _try_all([self._transport.leave], STRAGGLERS_S)


def _failures(calls: Mapping[K, asyncio.Future[Any]]) -> dict[K, BaseException]:
    """Return the errors of the calls that have failed by now."""
    ended = {key: call.exception() for key, call in calls.items() if call.done() and not call.cancelled()}
    return {key: error for key, error in ended.items() if error is not None}


async def _answer(call: Callable[[], Awaitable[T]], patience_s: float = PATIENCE_S) -> T:
    """Make a call, perhaps in a task that ends before it begins: an older coroutine would be lost with it."""
    try:
        async with asyncio.timeout(patience_s):
            return await call()
    except TimeoutError as error:
        raise SamplerError(f"no answer within {patience_s:.0f} s") from error


async def _try_all(calls: Iterable[Callable[[], Awaitable[Any]]], patience_s: float = PATIENCE_S) -> bool:
    """Make all calls, log their errors and return whether there were none."""
    results = await asyncio.gather(*(_answer(call, patience_s) for call in calls), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        _log.log(logging.INFO if isinstance(error, SkyrlTinkerError) else logging.ERROR, "ignored: %r", error)
    return not errors
