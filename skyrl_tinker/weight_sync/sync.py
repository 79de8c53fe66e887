"""Sync of full parameters to all replicas or none: its phases, and the restoration when one fails."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from skyrl_tinker.errors import SamplerError, SkyrlTinkerError, TrainerError
from skyrl_tinker.weight_sync.transport import (
    Replica,
    SyncPhase,
    WeightSyncError,
    WeightTransport,
    WeightUpdateTarget,
)

PATIENCE_S = 300.0
"""Limit for one answer of one replica: loading large weights may take minutes."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Synced:
    """Figures of one sync. `paused_s`: how long requests were paused."""

    size: int  # bytes
    seconds: float
    paused_s: float


async def sync_weights(
    control: WeightUpdateTarget,
    transport: WeightTransport,
    directory: Path,
    version: str,
    previous: tuple[Path, str],
) -> Synced:
    """Make every replica of `control` serve the weights in `directory` as `version`.

    Requests are paused as briefly as the transport can, then continue with the new weights and nothing cached
    from the old. WeightSyncError, naming phase and replicas: the old weights go on serving everywhere.
    Replicas that had taken the new ones were given those of `previous` again (directory and version, which
    must still be there). One sync at a time per transport.
    """
    update = _Update({url: control.replica(url) for url in control.server_urls}, transport)
    try:
        return await update.run(directory, version)
    except BaseException as error:
        lost = await update.undo(previous)
        if isinstance(error, SkyrlTinkerError):
            raise await update.explain(error, version, lost) from error
        raise


class _Update:
    def __init__(self, replicas: Mapping[str, Replica], transport: WeightTransport) -> None:
        self._replicas = replicas
        self._transport = transport
        self._phase: SyncPhase = "open"
        self._failures: dict[str, SkyrlTinkerError] = {}
        self._paused_at: float | None = None
        self._changed: tuple[str, ...] = ()  # may hold other weights than the old

    async def run(self, directory: Path, version: str) -> Synced:
        began = time.monotonic()
        try:
            chunks = await self._transport.open(directory)
            await self._form()
            await self._start()
            for index in range(len(chunks)):
                await self._transfer(index)
            await self._finish(version)
            await self._call_all("resume", lambda url: self._replicas[url].resume())
            ended = time.monotonic()
        finally:  # a trainer that fails at it is dead, which the engine notices
            await _try_all([self._transport.close()])
        assert self._paused_at is not None
        size = sum(chunk.size for chunk in chunks)
        return Synced(size, ended - began, ended - self._paused_at)

    async def undo(self, previous: tuple[Path, str]) -> tuple[str, ...]:
        """Restore the old weights; return the replicas where that failed."""
        await _try_all([self._transport.leave()])
        await self._discard()
        lost = [url for url in self._changed if not await self._restore(url, previous)]
        if self._paused_at is not None:
            await _try_all(replica.resume() for url, replica in self._replicas.items() if url not in lost)
        return tuple(lost)

    async def explain(self, error: SkyrlTinkerError, version: str, lost: tuple[str, ...]) -> WeightSyncError:
        """Make the error; a dead replica explains broken connections of the others, so it is named alone."""
        failures = {} if isinstance(error, TrainerError) else self._failures
        dead = [url for url in failures if not await _try_all([self._replicas[url].health()])]
        named = dead or list(failures)
        causes = "; ".join(f"{url}: {failures[url]}" for url in named) or str(error)
        text = f"weights {version} are not served, the old ones are: {self._phase} failed: {causes}"
        if lost:
            text += f"; without usable weights, to be started again: {', '.join(lost)}"
        return WeightSyncError(text, self._phase, named, lost)

    async def _form(self) -> None:
        self._phase = "init"
        if self._transport.members == tuple(self._replicas):
            return
        workers = await self._call_all("init", lambda url: self._replicas[url].world_size())
        messages = dict(zip(self._replicas, await self._transport.form(workers), strict=True))
        await self._call_beside(
            "init",
            lambda url: self._replicas[url].init_weight_transfer_engine(messages[url]),
            self._transport.meet(),
        )
        self._transport.members = tuple(self._replicas)

    async def _start(self) -> None:
        if not self._transport.staged:
            await self._pause()
            self._changed = tuple(self._replicas)
        await self._call_all("start", lambda url: self._replicas[url].start_weight_update())

    async def _transfer(self, index: int) -> None:
        self._phase = "update"
        message = await self._transport.load(index)
        await self._call_beside(
            "update", lambda url: self._replicas[url].update_weights(message), self._transport.send()
        )

    async def _finish(self, version: str) -> None:
        if self._transport.staged:
            await self._pause()
            self._changed = tuple(self._replicas)
        await self._call_all("finish", lambda url: self._replicas[url].finish_weight_update(version))

    async def _pause(self) -> None:
        """Pause and clear caches of the old weights; running sequences are computed again."""
        self._paused_at = time.monotonic()
        await self._call_all("pause", lambda url: self._replicas[url].pause("keep", clear_cache=True))

    async def _call_all(self, phase: SyncPhase, call: Callable[[str], Awaitable[T]]) -> list[T]:
        """Make the same call to every replica at once; all run to their end, so none changes things later."""
        self._phase = phase
        results = await asyncio.gather(
            *(_answer(call(url)) for url in self._replicas), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            self._failures = {
                url: result
                for url, result in zip(self._replicas, results, strict=True)
                if isinstance(result, SkyrlTinkerError)
            }
            raise errors[0]
        return [result for result in results if not isinstance(result, BaseException)]

    async def _call_beside(
        self, phase: SyncPhase, call: Callable[[str], Awaitable[None]], trainers: Coroutine[Any, Any, None]
    ) -> None:
        """Call all replicas while the trainer does its part; if that fails, they stop waiting for it."""
        sending = asyncio.ensure_future(trainers)
        receiving = asyncio.ensure_future(self._call_all(phase, call))
        try:
            await sending
        except BaseException:
            await _try_all([self._transport.leave()])
            await _try_all([receiving])
            raise
        await receiving

    async def _discard(self) -> None:
        """End the failed session; the replicas answer with an error by design."""
        discard = self._transport.discard
        await _try_all(replica.update_weights(discard) for replica in self._replicas.values())

    async def _restore(self, url: str, previous: tuple[Path, str]) -> bool:
        """Bring one replica back to the old weights, alone so that a dead one hinders no other."""
        again = _Update({url: self._replicas[url]}, self._transport)
        try:
            await again.run(*previous)
        except SkyrlTinkerError as error:
            _log.error("replica %s could not be given weights %s again: %s", url, previous[1], error)
            return False
        return True


async def _answer(call: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await call
    except TimeoutError as error:
        raise SamplerError(f"no answer within {PATIENCE_S:.0f} s") from error


async def _try_all(calls: Iterable[Awaitable[Any]]) -> bool:
    """Await all, log their errors and return whether there were none."""
    results = await asyncio.gather(*map(_answer, calls), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        _log.log(logging.INFO if isinstance(error, SkyrlTinkerError) else logging.ERROR, "ignored: %r", error)
    return not errors
