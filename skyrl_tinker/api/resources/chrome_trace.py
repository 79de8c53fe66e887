"""A session's requests as a trace, in the JSON array of the Trace Event Format, which Perfetto reads:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

Each model and each sampler is a process there. Requests overlap, so each is a pair of async events
("b" and "e") of its own id.
"""

from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from typing import Any

import orjson

from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.store.reports import timeline
from skyrl_tinker.store.reports.timeline import Slice, Track
from skyrl_tinker.store.store import Store

PAGE = 1000
Event = dict[str, Any]


async def chrome_trace(store: Store, session: SessionId) -> AsyncIterator[bytes]:
    """JSON, in pieces: a page of requests at a time is in memory.

    Each is read in a thread: reads on the loop never wait, and so would hold it until the end.
    """
    separator = b"["
    async for events in _pages(store, session):
        yield separator + b",\n".join(map(orjson.dumps, events))
        separator = b",\n"
    yield b"]\n" if separator != b"[" else b"[]\n"


async def _pages(store: Store, session: SessionId) -> AsyncIterator[list[Event]]:
    numbers = count(1)
    async for track in _tracks(store, session):
        number = next(numbers)
        yield [{"ph": "M", "pid": number, "name": "process_name", "args": {"name": track.label}}]
        async for slices in _slices(store, track):
            yield [event for each in slices for event in _events(each, number)]


async def _tracks(store: Store, session: SessionId) -> AsyncIterator[Track]:
    """Models first, then samplers, in the order in which they were made."""
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


def _events(each: Slice, process: int) -> list[Event]:
    """Of what is pending only the begin: Perfetto draws it to the end of the trace."""
    common = {"cat": "request", "id": each.id, "pid": process, "tid": 0, "name": each.kind}
    told = {"seq_id": each.seq_id, "status": each.status, "request_id": each.request_id}
    begin = {**common, "ph": "b", "ts": _microseconds(each.created_at), "args": told}
    if each.finished_at is None:
        return [begin]
    return [begin, {**common, "ph": "e", "ts": _microseconds(each.finished_at)}]


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
