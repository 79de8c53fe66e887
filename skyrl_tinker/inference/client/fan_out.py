"""Concurrent calls to all replicas, past the router: all or none succeed; errors name every failure."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.http_connection import HttpStatusError, JsonHttp
from skyrl_tinker.inference.client.in_flight import Attempt, InFlight
from skyrl_tinker.inference.constants import BASE_MODEL

ABORT_POLL_S = 0.02
Params = Mapping[str, str] | Sequence[tuple[str, str]]
Locate = Callable[[str, str], Awaitable[str]]
"""(URL of a replica, directory of this host) -> path or URL by which the replica reads it."""
Call = Callable[[str], Awaitable[Any]]
"""A call to the replica at this URL."""
T = TypeVar("T", bool, str)
_log = logging.getLogger(__name__)


async def same_path(_: str, directory: str) -> str:
    """Locate a directory for replicas that are all on this host."""
    return directory


@dataclass
class FanOut(ABC):
    """`server_urls`: all replicas. A call that fails on one of them raises SamplerError.

    `load_route`: that loads an adapter. `has_loaded`: words of its refusal of one that it has.
    """

    load_route: ClassVar[str]
    has_loaded: ClassVar[str]

    server_urls: tuple[str, ...]
    http: JsonHttp = field(default_factory=JsonHttp)
    in_flight: InFlight = field(default_factory=InFlight)
    patience_s: float = 60.0
    """Limit for the answer to a short call."""
    locate: Locate = same_path

    def replica(self, url: str) -> Self:
        """Return the control plane of one replica, over the same connections."""
        return type(self)((url,), self.http, patience_s=self.patience_s, locate=self.locate)

    @abstractmethod
    async def world_sizes(self) -> tuple[int, ...]:
        """Count the workers of each replica."""

    async def world_size(self) -> int:
        """Count the workers of all replicas together."""
        return sum(await self.world_sizes())

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter on all replicas or none. A name has one version, so a second load is harmless."""
        results = await self._gather(lambda url: self._load(url, name, path))
        if any(isinstance(result, BaseException) for result in results.values()):
            touched = [url for url, result in results.items() if result is not False]
            await self._undo(touched, lambda url: self._unload(url, name))
            require_all(results)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter on all replicas; harmless where it is not loaded."""
        await self._each(lambda url: self._unload(url, name))

    async def adapters(self) -> list[str]:
        """List the names of the adapters that any replica has."""
        answers = await self._call_all("GET", "/v1/models")
        return sorted({model["id"] for answer in answers for model in answer["data"] if model.get("parent")})

    async def max_model_len(self) -> int:
        """Return the longest sequence, in tokens, that every replica takes."""
        answers = await self._call_all("GET", "/v1/models")
        return min(
            int(model["max_model_len"])
            for answer in answers
            for model in answer["data"]
            if model["id"] == BASE_MODEL
        )

    async def health(self) -> None:
        """Raise SamplerError when a replica cannot take requests."""
        await self._call_all("GET", "/health")

    @abstractmethod
    async def require_arguments(self, *, keeps_cache: bool) -> None:
        """Raise SamplerError for a server of others without arguments that no answer of it shows.

        `keeps_cache`: also without those of SamplerSpec.keeps_cache.
        """

    async def _load(self, url: str, name: str, path: str) -> bool:
        """Load it on one replica; False when it was there already."""
        try:
            message = {"lora_name": name, "lora_path": await self._located(url, path)}
            await self._call(url, "POST", self.load_route, message)
        except RefusedError as error:
            if self.has_loaded in error.answer.message:
                return False
            raise
        return True

    @abstractmethod
    async def _unload(self, url: str, name: str) -> None:
        """Unload it from one replica; harmless where it is not loaded."""

    async def abort(self, tag: str) -> None:
        """Interrupt the tag's requests in progress (DataPlane.sample); their callers resume them.

        Returns when all of them have ended, on any replica. Requests that begin meanwhile are left alone.
        """
        await self._end(self.in_flight.switch(tag))

    async def interrupt(self, model: str) -> None:
        """Interrupt the interruptible requests of a model, as `abort` does, under the same weights."""
        await self._end(self.in_flight.interruptible(model))

    async def _end(self, attempts: list[Attempt]) -> None:
        while left := self.in_flight.still(attempts):
            ids = [attempt.id for attempt in left]  # some may not have reached a sampler yet
            await asyncio.gather(*(self._abort(url, ids) for url in self.server_urls))
            await asyncio.sleep(ABORT_POLL_S)

    async def abort_tagged(self) -> None:
        """Interrupt the requests of all tags, also those that begin meanwhile; return when all have ended."""
        while tags := self.in_flight.tags():
            await asyncio.gather(*map(self.abort, tags))

    @abstractmethod
    async def _abort(self, url: str, attempts: list[str]) -> None:
        """End these requests, given by Attempt.id, where the replica has them."""

    async def _tell(self, path: str, info: Mapping[str, Any], key: str | None = None) -> None:
        """Send a message to all replicas; never retried.

        `key`: the message's key in the body; None: the message is the body.
        """

        async def send(url: str) -> Any:
            message = dict(info)
            if "directory" in message:
                message["directory"] = await self._located(url, message["directory"])
            body = message if key is None else {key: message}
            return await self._call(url, "POST", path, body, repeatable=False, long=True)

        await self._each(send)

    async def _located(self, url: str, directory: str) -> str:
        try:
            return await self.locate(url, directory)
        except OSError as error:
            raise UnreachableError(f"{url}: {error}") from error

    async def _call_all(
        self, method: str, path: str, json: Mapping[str, Any] | None = None, **options: Any
    ) -> list[Any]:
        """Make the same call to all replicas concurrently. Raises SamplerError unless all succeed."""
        call = partial(self._call, method=method, path=path, json=json, **options)
        return list((await self._each(call)).values())

    async def _each(self, call: Call) -> dict[str, Any]:
        """Make a call to all replicas concurrently. Raises SamplerError unless all succeed."""
        results = await self._gather(call)
        require_all(results)
        return results

    async def _all_or_none(self, call: Call, *, undo: Call) -> None:
        """Make a call to all replicas. If one fails, undo it on all, as perhaps only the answer was lost.

        Raises SamplerError then.
        """
        results = await self._gather(call)
        if any(isinstance(result, BaseException) for result in results.values()):
            await self._undo(results, undo)
            require_all(results)

    async def _undo(self, urls: Iterable[str], call: Call) -> None:
        for url, result in (await self._gather(call, urls)).items():
            if isinstance(result, SamplerError):
                _log.warning("%s could not take back what other replicas failed at: %s", url, result)

    async def _gather(self, call: Call, urls: Iterable[str] | None = None) -> dict[str, Any]:
        """Return answers or SamplerErrors by replica. All calls run to their end: none takes effect later."""
        targets = list(self.server_urls if urls is None else urls)
        if not targets and urls is None:
            raise SamplerError("no sampler is running")
        results = await asyncio.gather(*map(call, targets), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, SamplerError):
                raise result
        return dict(zip(targets, results, strict=True))

    async def _call(
        self,
        url: str,
        method: str,
        path: str,
        json: Mapping[str, Any] | None = None,
        *,
        params: Params | None = None,
        repeatable: bool = True,
        long: bool = False,
    ) -> Any:
        """Call one replica and return its answer. Raises SamplerError, naming the replica and the call."""
        try:
            async with asyncio.timeout(None if long else self.patience_s):
                answer = await self.http.request(
                    method, url + path, json=json, params=params, repeatable=repeatable
                )
                return answer.content
        except HttpStatusError as error:
            raise RefusedError(f"{method} {url}{path}: {error}", error) from error
        except SamplerError as error:
            raise UnreachableError(str(error)) from error
        except TimeoutError as error:
            text = f"{method} {url}{path}: no answer within {self.patience_s:g} s"
            raise UnreachableError(text) from error


class RefusedError(SamplerError):
    """A replica answered with an error."""

    def __init__(self, message: str, answer: HttpStatusError) -> None:
        super().__init__(message)
        self.answer = answer


class UnreachableError(SamplerError):
    """A replica gave no answer."""


def require_all(results: Mapping[str, Any]) -> None:
    """Raise a SamplerError that names every replica that failed, if any."""
    failures = [result for result in results.values() if isinstance(result, SamplerError)]
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise SamplerError("; ".join(str(failure) for failure in failures)) from failures[0]


def common(values: Sequence[T]) -> T:
    if len(set(values)) != 1:
        raise SamplerError(f"replicas differ: {list(values)}")
    return values[0]
