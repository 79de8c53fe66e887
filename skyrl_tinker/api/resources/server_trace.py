"""Trace of the last minutes in the Trace Event Format, which Perfetto and chrome://tracing read.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
Each run and the samplers of each session are a process with one async slice for each request, divided into
its wait, its runs, and the way of its answer. The trainer, with a thread for the units and for each rank of
each base model, and the way of weights to the samplers are processes of their own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import orjson

from skyrl_tinker.api.resources.chrome_trace import Event, microseconds, process_name, request_events
from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.protocol.activity import Activity, PublishSpan, SampleSpan, SyncSpan, UnitSpan
from skyrl_tinker.store.console.traced_requests import TracedRequest

TRAINER, WEIGHTS, QUEUES, FIRST = 1, 2, 3, 4
"""Process ids; those of runs and samplers begin at FIRST."""
UNITS = -1
"""Place of the units of a base model before its ranks."""
_FIXED = {TRAINER: "trainer", WEIGHTS: "weights to the samplers", QUEUES: "requests not finished"}


def trace_of(requests: Sequence[TracedRequest], activity: Activity, *, addresses: bool = True) -> bytes:
    """Return the JSON. Units show how many requests were in them, and name only those of `requests`.

    `addresses`: show those of the replicas that sampled.
    """
    tracks = {track: pid for pid, track in enumerate(dict.fromkeys(map(_track, requests)), FIRST)}
    threads = _threads(activity.units)
    samples = activity.samples if addresses else [replace(span, replicas=()) for span in activity.samples]
    spans = _spans(activity.units, samples)
    seen = {request.id for request in requests}
    events = chain(
        (process_name(pid, name) for pid, name in _FIXED.items()),
        chain.from_iterable(_named(pid, *track) for track, pid in tracks.items()),
        _thread_names(threads),
        chain.from_iterable(_unit(unit, threads, seen) for unit in activity.units),
        chain.from_iterable(_publish(number, span) for number, span in enumerate(activity.publishes)),
        chain.from_iterable(map(_sync, activity.syncs)),
        chain.from_iterable(
            _request(request, tracks[_track(request)], spans.get(request.id)) for request in requests
        ),
        _counters(requests),
    )
    return orjson.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"})


def _track(request: TracedRequest) -> tuple[str, str]:
    """Return the id and the name of the process that shows a request."""
    if request.run:
        return request.run, f"run {request.name or request.run}"
    kind = "samples" if request.sampler else "requests"
    return request.session, f"{kind} of {request.name or request.session}"


def _named(pid: int, identity: str, name: str) -> Iterator[Event]:
    yield process_name(pid, name)
    yield {"ph": "M", "pid": pid, "name": "process_labels", "args": {"labels": identity}}


def _spans(units: Iterable[UnitSpan], samples: Iterable[SampleSpan]) -> dict[int, UnitSpan | SampleSpan]:
    """Return the work that ran requests, by future id."""
    trained = {each: unit for unit in units for each in unit.future_ids}
    return {**trained, **{span.future_id: span for span in samples}}


def _threads(units: Iterable[UnitSpan]) -> dict[tuple[str, int], int]:
    """Return the thread ids of units and ranks, by base model and rank."""
    found = {
        (unit.base_model, rank) for unit in units for rank in (UNITS, *(each.rank for each in unit.ranks))
    }
    return {thread: tid for tid, thread in enumerate(sorted(found))}


def _thread_names(threads: Mapping[tuple[str, int], int]) -> Iterator[Event]:
    several = len({base_model for base_model, _ in threads}) > 1
    for (base_model, rank), tid in threads.items():
        name = "units" if rank == UNITS else f"rank {rank}"
        args = {"name": f"{base_model}: {name}" if several else name}
        yield {"ph": "M", "pid": TRAINER, "tid": tid, "name": "thread_name", "args": args}


def _unit(unit: UnitSpan, threads: Mapping[tuple[str, int], int], seen: set[int]) -> Iterator[Event]:
    mine = [future_id for future_id in unit.future_ids if future_id in seen]
    args = {"requests": len(unit.future_ids), "tokens": unit.tokens, "yours": len(mine)}
    tid = threads[unit.base_model, UNITS]
    yield _complete(TRAINER, tid, unit.kind, unit.began_at, unit.ended_at, args)
    for each in unit.ranks:
        tid = threads[unit.base_model, each.rank]
        yield _complete(TRAINER, tid, each.method, each.began_at, each.ended_at, {})


def _sync(span: SyncSpan) -> Iterator[Event]:
    name = f"sync {span.version}"
    yield _complete(WEIGHTS, 0, name, span.began_at, span.ended_at, {})
    yield _complete(WEIGHTS, 0, "samplers pause", span.paused_at, span.ended_at, {})


def _complete(
    pid: int, tid: int, name: str, began_at: float, ended_at: float, args: Mapping[str, Any]
) -> Event:
    ts, end = microseconds(began_at), microseconds(ended_at)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": end - ts, "args": args}


def _publish(number: int, span: PublishSpan) -> list[Event]:
    common = {"cat": "weights", "id": number, "pid": WEIGHTS, "tid": 0, "name": f"publish {span.weights}"}
    return _slice(common, span.began_at, span.ended_at, {})


def _request(request: TracedRequest, pid: int, span: UnitSpan | SampleSpan | None) -> Iterator[Event]:
    """Yield a request with its parts in it."""
    begin, *end = request_events(request, pid)
    yield begin
    if span is not None:
        common = {"cat": "request", "id": request.id, "pid": pid, "tid": 0}
        ran = {"replicas": span.replicas} if isinstance(span, SampleSpan) and span.replicas else {}
        yield from _slice({**common, "name": "wait"}, request.created_at, span.began_at, {})
        yield from _slice({**common, "name": "run"}, span.began_at, span.ended_at, ran)
        if request.finished_at is not None and request.finished_at > span.ended_at:
            yield from _slice({**common, "name": "answer"}, span.ended_at, request.finished_at, {})
    yield from end


def _slice(
    common: Mapping[str, Any], began_at: float, ended_at: float, args: Mapping[str, Any]
) -> list[Event]:
    begin, end = microseconds(began_at), microseconds(ended_at)
    return [{**common, "ph": "b", "ts": begin, "args": args}, {**common, "ph": "e", "ts": max(begin, end)}]


def _counters(requests: Iterable[TracedRequest]) -> Iterator[Event]:
    """Yield how many requests were accepted and not finished, at each change."""
    changes = [(request.created_at, 1, request.kind) for request in requests]
    changes += [(each.finished_at, -1, each.kind) for each in requests if each.finished_at is not None]
    now: Counter[str] = Counter(training=0, sampling=0)
    for at, change, kind in sorted(changes, key=lambda item: item[0]):
        now["sampling" if kind is RequestKind.SAMPLE else "training"] += change
        yield {"ph": "C", "pid": QUEUES, "name": "not finished", "ts": microseconds(at), "args": dict(now)}
