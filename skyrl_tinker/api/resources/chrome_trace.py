"""Trace of a session's requests, as a JSON array of the Trace Event Format, which Perfetto reads.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
Each model and each sampler is a process. Requests overlap, so each one is a pair of async events ("b", "e")
with an id.
"""

from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import count
from typing import Any, TypeVar

import orjson

from skyrl_tinker.domain.ids import OwnerId, SessionId
from skyrl_tinker.store.console import traced_requests
from skyrl_tinker.store.console.traced_requests import TracedRequest, Track
from skyrl_tinker.store.database.rows import PAGE
from skyrl_tinker.store.store import Store

Event = dict[str, Any]
T = TypeVar("T", Track, TracedRequest)


async def chrome_trace(store: Store, session: SessionId, owner: OwnerId | None) -> AsyncIterator[bytes]:
    """Yield the JSON in pieces, with one page of requests in memory at a time.

    Pages are read in a thread: reads on the event loop never yield, so a long session would block it.
    """
    separator = b"["
    async for events in _pages(store, session, owner):
        yield separator + b",\n".join(map(orjson.dumps, events))
        separator = b",\n"
    yield b"]\n" if separator != b"[" else b"[]\n"


async def _pages(store: Store, session: SessionId, owner: OwnerId | None) -> AsyncIterator[list[Event]]:
    """Yield the events of models, then of samplers, each in order of creation."""
    process_ids = count(1)
    for query in (traced_requests.list_models, traced_requests.list_samplers):
        async for tracks in _rows(store, owner, partial(query, session=session)):
            for track in tracks:
                pid = next(process_ids)
                yield [process_name(pid, track.label)]
                async for requests in _rows(
                    store, owner, partial(traced_requests.requests_after, track=track.requests)
                ):
                    yield [event for request in requests for event in request_events(request, pid)]


async def _rows(store: Store, owner: OwnerId | None, query: Callable[..., list[T]]) -> AsyncIterator[list[T]]:
    after: int | None = -1
    while True:
        page = await store.report(partial(query, after=after, limit=PAGE), owner)
        if page:
            yield page
            after = page[-1].seq_id
        if len(page) < PAGE:
            break


def process_name(pid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def request_events(request: TracedRequest, pid: int) -> list[Event]:
    """Return begin and end; a pending request has no end, and Perfetto draws it to the end of the trace."""
    common = {"cat": "request", "id": request.id, "pid": pid, "tid": 0, "name": request.kind}
    args = {"seq_id": request.seq_id, "status": request.status, "request_id": request.request_id}
    begin = {**common, "ph": "b", "ts": microseconds(request.created_at), "args": args}
    if request.finished_at is None:
        return [begin]
    return [begin, {**common, "ph": "e", "ts": microseconds(request.finished_at)}]


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
