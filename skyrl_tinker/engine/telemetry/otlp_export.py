"""Traces of finished requests, units and syncs to an OpenTelemetry collector, by OTLP over HTTP.

Requests come from the journal, and the times of their work from the activity log, as on the trace page. The
trace id of a request is its request id. The journal is also the queue: its cursor stays while no collector
answers. A separate thread sends to the collector.
"""

import asyncio
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from skyrl_tinker import __version__
from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.engine.telemetry.activity_log import ActivityLog, AnySpan
from skyrl_tinker.protocol.activity import PublishSpan, SampleSpan, SyncSpan, UnitSpan
from skyrl_tinker.store.console.traced_requests import FinishedRequest, finished_requests
from skyrl_tinker.store.futures.outcomes import last_result_id
from skyrl_tinker.store.store import Store

ROUND_S = 2.0
SETTLE_S = 5.0
"""Seconds from a request's end to its export: units are recorded only after their answers are committed."""
TIMEOUT_S = 5.0  # of one export, with its retries
LAST_S = 2.0  # for the last export when the engine ends
KEEP_S = 600.0
"""Age in seconds from which finished requests are not kept for a collector that does not answer."""
PAGE = 256
"""Most requests, and most units, in one export."""
MOST = 50_000
"""Most requests with parts, and most units and syncs, that wait for their export."""
_PATH = "/v1/traces"
_SCOPE = InstrumentationScope("skyrl_tinker", __version__)
_IDS = RandomIdGenerator()
T = TypeVar("T")
_log = logging.getLogger(__name__)


class _TracePart(NamedTuple):
    """Span of a request; `unit`: trace of the trainer's unit, if it was one."""

    span: AnySpan
    unit: SpanContext | None = None


class _WorkTrace(NamedTuple):
    span: UnitSpan | SyncSpan
    context: SpanContext


class SpanExport:
    def __init__(self, store: Store, activity: ActivityLog, endpoint: str, home: Path) -> None:
        """`endpoint`: of the collector, without the path of traces; `home` names this server."""
        self._store = store
        self._collector = urlsplit(endpoint).netloc.rpartition("@")[2]
        url = endpoint.rstrip("/").removesuffix(_PATH) + _PATH
        self._exporter = trace_exporter.OTLPSpanExporter(url, timeout=TIMEOUT_S)
        self._thread = ThreadPoolExecutor(1, "otlp")
        self._reasons = _Reasons()
        self._resource = Resource.create(
            {
                "service.name": "skyrl-tinker",
                "service.version": __version__,
                "service.instance.id": str(uuid5(NAMESPACE_URL, f"file://{socket.gethostname()}{home}")),
            }
        )
        self._cursor: int | None = None  # after the last request exported
        self._parts: dict[int, list[_TracePart]] = {}  # by future id
        self._work: dict[int, _WorkTrace] = {}  # by span id
        self._problem: str | None = None
        activity.follow(self._note)

    def _note(self, span: AnySpan) -> None:
        if isinstance(span, UnitSpan | SyncSpan):
            context = _context(_IDS.generate_trace_id(), _IDS.generate_span_id())
            self._work[context.span_id] = _WorkTrace(span, context)
            for future_id in span.future_ids if isinstance(span, UnitSpan) else ():
                self._parts.setdefault(future_id, []).append(_TracePart(span, context))
        else:
            self._parts.setdefault(span.future_id, []).append(_TracePart(span))
        _bound(self._work)
        _bound(self._parts)

    async def run(self) -> None:
        """Export all work that finishes from now on, indefinitely."""
        self._cursor = await persistently(self._store.read, last_result_id)
        logging.getLogger(trace_exporter.__name__).addFilter(self._reasons)
        while True:
            await asyncio.sleep(ROUND_S)
            await self._export(SETTLE_S)

    async def close(self) -> None:
        """Export finished work, if the collector answers quickly, and end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await self._export(0.0)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        self._thread.shutdown(wait=False, cancel_futures=True)
        logging.getLogger(trace_exporter.__name__).removeFilter(self._reasons)

    async def _export(self, settle_s: float) -> None:
        try:
            while self._cursor is not None and await self._export_page(self._cursor, settle_s):
                pass
        except Exception as error:  # a diagnostic must not end the engine
            self._report(repr(error))

    async def _export_page(self, cursor: int, settle_s: float) -> bool:
        """Export units, syncs and requests that finished `settle_s` ago; return whether there may be more."""
        page = await self._store.fetch(partial(finished_requests, after=cursor, limit=PAGE))
        now = self._store.now()
        settled = list(takewhile(lambda each: not 0 <= now - each.finished_at < settle_s, page))
        work = list(islice(self._work.values(), PAGE))
        if not settled and not work:
            return False
        parts = {each.id: tuple(self._parts.get(each.id, ())) for each in settled}
        loop = asyncio.get_running_loop()
        problem = await loop.run_in_executor(self._thread, self._send, settled, parts, work)
        self._report(problem)
        if problem is None:
            for done in work:
                self._work.pop(done.context.span_id, None)
        if settled and (problem is None or now - settled[-1].finished_at > KEEP_S):
            self._cursor = settled[-1].result_id
            for each in settled:
                self._parts.pop(each.id, None)
        return problem is None and PAGE in (len(settled), len(work))

    def _send(
        self,
        requests: Sequence[FinishedRequest],
        parts: Mapping[int, Sequence[_TracePart]],
        work: Sequence[_WorkTrace],
    ) -> str | None:
        """Send spans; return why the collector did not accept them, None if it did."""
        spans = [span for each in work for span in _work_spans(each.span, each.context, self._resource)]
        for request in requests:
            spans.extend(_request_spans(request, parts[request.id], self._resource))
        self._reasons.first = None
        if self._exporter.export(spans) is SpanExportResult.SUCCESS:
            return None
        return self._reasons.first or "no reason given"

    def _report(self, problem: str | None) -> None:
        """Log when exports begin to fail, and when they succeed again."""
        if problem is not None and self._problem is None:
            _log.warning("no traces reach the collector %s, and work goes on: %s", self._collector, problem)
        if problem is None and self._problem is not None:
            _log.info("traces reach the collector %s again", self._collector)
        self._problem = problem


class _Reasons(logging.Filter):
    """Keeper of the first message of an export: the exporter reports a failure only in its log."""

    first: str | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the message and drop the record."""
        self.first = self.first or record.getMessage()
        return False


def _work_spans(
    work: UnitSpan | SyncSpan, context: SpanContext, resource: Resource
) -> Iterator[ReadableSpan]:
    """Yield the span of a unit and the calls of its ranks; or that of a sync and its pause."""
    whole, part = partial(_span, resource, context), partial(_span, resource, parent=context)
    match work:
        case UnitSpan(kind, began_at, ended_at, tokens, future_ids, ranks, base_model):
            size = {"requests": len(future_ids), "estimated_tokens": tokens}
            yield whole(f"unit {kind}", began_at, ended_at, {"kind": kind, "base_model": base_model, **size})
            for number, rank in enumerate(ranks, 1):
                name = f"rank {rank.rank} {rank.method}"
                yield part(_below(context, number), name, rank.began_at, rank.ended_at, {"rank": rank.rank})
        case SyncSpan(version, began_at, paused_at, ended_at, base_model):
            yield whole("sync", began_at, ended_at, {"version": version, "base_model": base_model})
            yield part(_below(context, 1), "pause", paused_at, ended_at, {})


def _request_spans(
    request: FinishedRequest, parts: Sequence[_TracePart], resource: Resource
) -> Iterator[ReadableSpan]:
    """Yield a request's span, then its children: its wait, its work, and the delivery of its answer."""
    root = _context(int(request.request_id, 16), int(request.request_id[16:], 16))
    status = Status(StatusCode.OK) if request.category is None else Status(StatusCode.ERROR, request.error)
    attributes, kinds = _request_attributes(request), {"kind": SpanKind.SERVER, "status": status}
    yield _span(resource, root, request.kind, request.created_at, request.finished_at, attributes, **kinds)
    for number, (name, began_at, ended_at, part) in enumerate(_slices(request, parts), 1):
        links = [Link(part.unit)] if part and part.unit else ()
        attributes = _part_attributes(part)
        context = _below(root, number)  # the same each time it is sent
        yield _span(resource, context, name, began_at, ended_at, attributes, parent=root, links=links)


def _span(
    resource: Resource,
    context: SpanContext,
    name: str,
    began_at: float,
    ended_at: float,
    attributes: Mapping[str, str | int | None],
    **others: Any,
) -> ReadableSpan:
    """Make a span. Attributes get our prefix; None: not known."""
    return ReadableSpan(
        name,
        context,
        resource=resource,
        attributes={f"skyrl_tinker.{key}": value for key, value in attributes.items() if value is not None},
        start_time=_nanoseconds(began_at),
        end_time=_nanoseconds(max(began_at, ended_at)),
        instrumentation_scope=_SCOPE,
        **others,
    )


def _slices(
    request: FinishedRequest, parts: Sequence[_TracePart]
) -> Iterator[tuple[str, float, float, _TracePart | None]]:
    """Yield names and times until the answer: units and publications are recorded a little after it."""
    parts = [part for part in parts if part.span.began_at < request.finished_at]
    for part in parts:
        name = "publish" if isinstance(part.span, PublishSpan) else "run"
        yield name, part.span.began_at, min(part.span.ended_at, request.finished_at), part
    runs = [part.span for part in parts if not isinstance(part.span, PublishSpan)]
    if runs:
        yield "wait", request.created_at, runs[0].began_at, None
        if request.finished_at > runs[-1].ended_at:
            yield "answer", runs[-1].ended_at, request.finished_at, None


def _request_attributes(request: FinishedRequest) -> Mapping[str, str | int | None]:
    return {
        "kind": request.kind,
        "outcome": request.category or "ok",
        "request_id": request.request_id,
        "future_id": request.id,
        "seq_id": request.seq_id,
        "session": request.session,
        "owner": request.owner,
        "model": request.run,
        "sampler": request.sampler,
        "input_tokens": request.input_tokens,
        "cached_tokens": request.cached_tokens,
        "output_tokens": request.output_tokens,
    }


def _part_attributes(part: _TracePart | None) -> Mapping[str, str | int | None]:
    match part:
        case _TracePart(UnitSpan(kind=kind)):
            return {"unit": kind}
        case _TracePart(PublishSpan(weights=weights)):
            return {"weights": weights}
        case _TracePart(SampleSpan(replicas=replicas)) if replicas:
            return {"replicas": " ".join(replicas)}
    return {}


def _bound(waiting: dict[T, Any]) -> None:
    """Drop the oldest beyond MOST."""
    while len(waiting) > MOST:
        del waiting[next(iter(waiting))]


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _below(context: SpanContext, number: int) -> SpanContext:
    return _context(context.trace_id, context.span_id ^ number)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
