"""Trace of a session's requests, as a JSON array of the Trace Event Format, which Perfetto reads.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
Each model and each sampler is a process. Requests overlap, so each one is a pair of async events ("b", "e")
with an id.
"""

from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from typing import Any

import orjson

from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.store.database.rows import PAGE
from skyrl_tinker.store.reports import timeline
from skyrl_tinker.store.reports.timeline import Slice, Track
from skyrl_tinker.store.store import Store

Event = dict[str, Any]


async def chrome_trace(store: Store, session: SessionId) -> AsyncIterator[bytes]:
    """Yield the JSON in pieces, with one page of requests in memory at a time.

    Pages are read in a thread: reads on the event loop never yield, so a long session would block it.
    """
    separator = b"["
    async for events in _pages(store, session):
        yield separator + b",\n".join(map(orjson.dumps, events))
        separator = b",\n"
    yield b"]\n" if separator != b"[" else b"[]\n"


async def _pages(store: Store, session: SessionId) -> AsyncIterator[list[Event]]:
    process_ids = count(1)
    async for track in _tracks(store, session):
        pid = next(process_ids)
        yield [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": track.label}}]
        async for slices in _slices(store, track):
            yield [event for request in slices for event in _events(request, pid)]


async def _tracks(store: Store, session: SessionId) -> AsyncIterator[Track]:
    """Yield models, then samplers, each in order of creation."""
    for query in (timeline.list_models, timeline.list_samplers):
        after = -1
        while True:
            page = await store.fetch(partial(query, session=session, after=after, limit=PAGE))
            for _, track in page:
                yield track
            if len(page) < PAGE:
                break
            after = page[-1][0]


async def _slices(store: Store, track: Track) -> AsyncIterator[list[Slice]]:
    after = -1
    while True:
        page = await store.fetch(partial(timeline.list_slices, track=track, after=after, limit=PAGE))
        if page:
            yield page
            after = page[-1].seq_id
        if len(page) < PAGE:
            break


def _events(request: Slice, pid: int) -> list[Event]:
    """Return begin and end; a pending request has no end, and Perfetto draws it to the end of the trace."""
    common = {"cat": "request", "id": request.id, "pid": pid, "tid": 0, "name": request.kind}
    args = {"seq_id": request.seq_id, "status": request.status, "request_id": request.request_id}
    begin = {**common, "ph": "b", "ts": microseconds(request.created_at), "args": args}
    if request.finished_at is None:
        return [begin]
    return [begin, {**common, "ph": "e", "ts": microseconds(request.finished_at)}]


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
