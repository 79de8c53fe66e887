"""Event loop without threads and without waiting: a seed decides what runs next, and how long things take.

Time passes only while nothing can run, and then at once. Work for threads runs on the loop, somewhat later.
Each callback belongs to a `Process` of the server; when that dies, none of its callbacks ever runs again.
"""

import asyncio
import gc
import heapq
import itertools
from asyncio import events
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any
from zlib import crc32

THREAD_S = 0.004
"""Most time that work in a thread takes."""


class Crash(BaseException):
    """Raised where a process dies: unlike an Exception it ends whatever runs."""


class Process:
    """One life of a process. `died`: the future that is done once it is over, or another server took over.

    `still_until`: when one that was `replaced` so goes on.
    """

    def __init__(self, kind: str, server: Any, loop: "VirtualLoop") -> None:
        self.kind = kind
        self.server = server
        self.dead = False
        self.ready = False
        self.fleets: list[Any] = []  # of an engine: replicas of each base model
        self.router: Any = None  # before several of the first
        self.is_up: Callable[[], bool] = lambda: self.ready
        self.is_changing: Callable[[], bool] = lambda: False  # a base model on demand starts, or ends
        self.ahead_s = 0.0  # its wall clock, before that of the database
        self.fence: Any = None  # of an engine of a server that holds a lease
        self.replaced = False
        self.still_until = 0.0
        self.died = loop.create_future()
        self.connections: set[asyncio.Future[Any]] = set()  # of clients, which see them break

    def kill(self) -> None:
        """End it here and now."""
        self.dead = True
        if not self.died.done():
            self.died.set_result(None)
        for connection in self.connections:
            if not connection.done():
                connection.set_exception(ConnectionResetError(f"the {self.kind} died"))


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class _Numbered:
    """Sets of them have the same order in every run."""

    number: int

    def __hash__(self) -> int:
        return self.number


class _Future(_Numbered, asyncio.Future[Any]):
    __hash__ = _Numbered.__hash__


class _Task(_Numbered, asyncio.Task[Any]):
    __hash__ = _Numbered.__hash__


class _Handle(events.Handle):
    """Made without a look at whether the loop is to be debugged."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., Any], args: Sequence[Any], loop: Any, context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None


class _Timer(_Handle, events.TimerHandle):
    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., Any],
        args: Sequence[Any],
        loop: Any,
        context: Context | None,
    ) -> None:
        _Handle.__init__(self, callback, args, loop, context)
        self._when = when
        self._scheduled = False


class _Moment(float):
    """Time of a timer, in a heap whose order is the same as that of timers themselves; it compares in C."""

    __slots__ = ("timer",)
    timer: events.TimerHandle


class VirtualLoop(asyncio.BaseEventLoop):
    """`trace`: digest of all that has happened so far."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self.trace = 0
        self._now = 0.0
        self._ready: list[events.Handle] = []
        self._scheduled: list[_Moment] = []
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[Any]] = []  # of dead processes, too, whose end nothing may notice
        self.errors: list[Any] = []
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        return self._now

    def note(self, what: str) -> None:
        """Add to the trace."""
        self.trace = crc32(f"{self._now} {what}".encode(), self.trace)

    def create_future(self) -> asyncio.Future[Any]:
        future = _Future.__new__(_Future)
        future.number = next(self._numbers)
        future.__init__(loop=self)  # type: ignore[misc]
        return future

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = _Task.__new__(_Task)
        task.number = next(self._numbers)
        task.__init__(coro, loop=self, name=name or str(task.number), context=context)  # type: ignore[misc]
        self._tasks.append(task)
        return task

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> events.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        moment = _Moment(when)
        timer = moment.timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, moment)
        return timer

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        self.call_later(self.random.random() * THREAD_S, self._work, future, func, args)
        return future

    def _work(self, future: "asyncio.Future[Any]", func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if future.cancelled() and self.random.random() < 0.5:
            return  # before it began; a thread that has begun goes on
        try:
            value = func(*args)
        except Crash:
            return
        except Exception as error:
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(value)

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        """Run to the end; what is left of processes is not told of it."""
        gc.disable()  # what it finalises would run at moments of its own
        try:
            self.run_until_complete(story)
            self.note(str(self.random.random()))
        finally:
            gc.enable()
            for task in (task for task in self._tasks if not task.done()):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close(task.get_coro())
            self._tasks.clear()
            self._ready.clear()
            self.close()

    def _run_once(self) -> None:
        """Run one callback of those that are ready, whichever the seed says."""
        ready = self._ready
        if not ready:
            self._pass_time()
        at = int(self.random.random() * len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        handle = ready.pop()
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is not None and process.still_until > self._now:
            self.call_at(process.still_until, ready.append, handle, context=Context())
        elif not handle._cancelled and (process is None or not process.dead):  # type: ignore[attr-defined]
            try:
                handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # as every loop, it goes on, and tells
                self.call_exception_handler({"exception": error, "handle": handle})

    def _pass_time(self) -> None:
        while self._scheduled:
            moment = heapq.heappop(self._scheduled)
            if not moment.timer._cancelled:  # type: ignore[attr-defined]
                self._now = max(self._now, float(moment))
                self._ready.append(moment.timer)
                return
        raise AssertionError("everything waits for ever")

    def _note_error(self, _: object, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), Crash):
            self.errors.append(context)

    def _write_to_self(self) -> None:
        """Wake nobody: there are no other threads."""

    def _process_events(self, event_list: object) -> None:
        """Do nothing: there are no sockets."""


def _close(coroutine: Any) -> None:
    """End what a dead process left waiting; what it does now has no effect on anything."""
    for _ in range(20):
        with suppress(BaseException):
            coroutine.close()
            return
