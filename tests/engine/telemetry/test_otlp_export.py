"""Traces as a collector gets them, of an engine whose workers are scripted."""

import asyncio
import logging
import random
import select
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from skyrl_tinker import __version__
from skyrl_tinker.engine.telemetry import otlp_export
from skyrl_tinker.engine.telemetry.otlp_export import SpanExport
from skyrl_tinker.training.actors import RankReply
from tests.api.support.passes import old_json
from tests.api.support.users import new_user, speak_as
from tests.api.support.waiting import Waiting, ready_model, submit, waiting
from tests.api.support.world import BASE, PROTOBUF, new_home, sample, step
from tests.engine.support.rows import queued
from tests.support.collector import Collector, collecting, values
from tests.support.waiting import PATIENCE_S, end, until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are not exported before `arrived` or the end, as nobody knows how soon what ran is noted."""
    monkeypatch.setattr(otlp_export, "ROUND_S", 0.02)
    for name in ("SETTLE_S", "TIMEOUT_S", "LAST_S"):
        monkeypatch.setattr(otlp_export, name, PATIENCE_S)


@pytest.fixture
async def busy(tmp_path: Path) -> AsyncIterator[Waiting]:
    async with waiting(new_home(tmp_path / "home")) as made:
        made.samplers.go_on.set()
        yield made


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@asynccontextmanager
async def exporting(world: Waiting, url: str) -> AsyncIterator[SpanExport]:
    export = SpanExport(world.store, world.metrics.activity, url, world.settings.root)
    running = asyncio.create_task(export.run())
    try:
        yield export
    finally:
        await end(running)
        await export.close()


async def answered(world: Waiting, path: str, body: dict[str, object], parts: int = 1) -> str:
    """Id of a request that has its answer, and of which so much is noted."""
    request = await submit(world.api, path, body)
    assert (await world.api.result(request, **PROTOBUF)).status_code == 200
    future = await world.api.id_of(request)
    await until(lambda: noted(world, future), parts.__le__)
    return request


def noted(world: Waiting, future: int) -> int:
    log = world.metrics.activity.since(0.0)
    units = sum(future in unit.future_ids for unit in log.units)
    return units + sum(part.future_id == future for part in (*log.samples, *log.publishes))


async def arrived(collector: Collector, request: str) -> dict[str, Span]:
    with settled():
        await until(lambda: collector.trace(request))
    return collector.trace(request)


@contextmanager
def settled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otlp_export, "SETTLE_S", 0.0)
        yield


def times(span: Span) -> tuple[int, int]:
    return span.start_time_unix_nano, span.end_time_unix_nano


async def test_each_request_is_a_trace_with_what_ran_for_it(busy: Waiting, collector: Collector) -> None:
    speak_as(busy.api, await new_user(busy.api, "alice"))
    begun = time.time_ns()
    async with exporting(busy, collector.url) as export:
        session = await busy.api.session()
        model = await ready_model(busy.api, session)
        trained = await answered(busy, "forward_backward", {**old_json(model, 1)})
        stepped = await answered(busy, "optim_step", step(model, 2))
        save = {"model_id": model, "seq_id": 3, "path": "a"}
        saved = await answered(busy, "save_weights_for_sampler", save, parts=2)
        sampler = await busy.api.sampler()
        sampled = await answered(busy, "asample", sample(sampler, 0))
        found = {request: await arrived(collector, request) for request in (trained, stepped, saved, sampled)}
        await until(lambda: not (export._parts or export._work))  # an export that is cut off is repeated
    ended = time.time_ns()
    future = await busy.api.id_of(trained)
    root = found[trained]["forward_backward"]
    assert values(root.attributes) == {
        "kind": "forward_backward",
        "outcome": "ok",
        "request_id": trained,
        "future_id": future,
        "seq_id": 1,
        "session": session,
        "owner": "alice",
        "model": model,
        "input_tokens": 2,
        "cached_tokens": 0,
        "output_tokens": 0,
    }
    assert (root.kind, root.status.code) == (Span.SPAN_KIND_SERVER, Status.STATUS_CODE_OK)
    assert values(found[sampled]["sample"].attributes)["sampler"] == sampler
    for request, kind in (
        (trained, "forward_backward"),
        (stepped, "optim_step"),
        (saved, "save_weights_for_sampler"),
        (sampled, "sample"),
    ):
        spans = found[request]
        root = spans.pop(kind)
        assert not root.parent_span_id
        assert {"wait", "run"} <= spans.keys()
        assert {span.parent_span_id for span in spans.values()} == {root.span_id}
        assert begun <= spans["wait"].start_time_unix_nano == root.start_time_unix_nano
        assert spans["wait"].end_time_unix_nano == spans["run"].start_time_unix_nano
        first, last = times(root)
        assert all(first <= begin <= end <= last <= ended for begin, end in map(times, spans.values()))
    units = {span.span_id: span for span in collector.spans if span.name.startswith("unit ")}
    (link,) = found[trained]["run"].links
    unit = units[link.span_id]
    assert (unit.trace_id, unit.name) == (link.trace_id, "unit forward_backward")
    assert unit.start_time_unix_nano == found[trained]["run"].start_time_unix_nano
    assert values(unit.attributes) == {
        "kind": "forward_backward",
        "base_model": BASE,
        "requests": 1,
        "estimated_tokens": 9,
    }
    assert not found[sampled]["run"].links
    assert values(found[saved]["publish"].attributes) == {"weights": "lora"}
    assert len({span.span_id for span in collector.spans}) == len(collector.spans), "each came once"


async def test_a_unit_has_the_calls_of_its_ranks_and_a_sync_its_pause(
    busy: Waiting, collector: Collector
) -> None:
    log, now = busy.metrics.activity, time.time()
    async with exporting(busy, collector.url):
        log.ranks("tiny", "run_pass", [RankReply(None, now, 0.5), RankReply(None, now, 0.25)])
        log.unit("tiny", [queued(9, 1, 1, tokens=10)], now)  # type: ignore[arg-type]
        log.sync("tiny", "v1", 2.0, 0.5)
        await until(lambda: len(collector.spans) == 5)
    named = {span.name: span for span in collector.spans}
    for parent, children in (
        ("unit forward_backward", ("rank 0 run_pass", "rank 1 run_pass")),
        ("sync", ("pause",)),
    ):
        for child in children:
            assert named[child].parent_span_id == named[parent].span_id
            assert named[child].trace_id == named[parent].trace_id
    first, last = times(named["rank 1 run_pass"])
    assert (last - first) / 1e9 == pytest.approx(0.25, abs=1e-3)
    assert values(named["rank 1 run_pass"].attributes) == {"rank": 1}
    assert values(named["sync"].attributes) == {"version": "v1", "base_model": "tiny"}


async def test_a_request_that_fails_says_why(busy: Waiting, collector: Collector) -> None:
    async with exporting(busy, collector.url):
        model = await ready_model(busy.api)
        refused = await answered(busy, "optim_step", step(model, 1, learning_rate=-1.0))
        spans = await arrived(collector, refused)
    assert spans.keys() == {"optim_step"}, "its turn in the order of its model comes after its answer"
    span = spans["optim_step"]
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert "learning_rate" in span.status.message
    assert values(span.attributes)["outcome"] == "user"


async def test_a_collector_knows_the_server_and_gets_the_headers_of_the_environment(
    busy: Waiting, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    for _ in range(2):
        async with exporting(busy, f"{collector.url}/v1/traces"):
            await arrived(collector, await answered(busy, "asample", sample(await busy.api.sampler(), 0)))
    assert collector.headers["authorization"] == "Bearer secret"
    resources = [
        {each.key: each.value.string_value for each in of_resource.resource.attributes}
        for request in collector.requests
        for of_resource in request.resource_spans
    ]
    assert {(each["service.name"], each["service.version"]) for each in resources} == {
        ("skyrl-tinker", __version__)
    }
    assert len({each["service.instance.id"] for each in resources}) == 1, "also after a restart"


async def test_what_finishes_just_before_the_end_is_sent(busy: Waiting, collector: Collector) -> None:
    async with exporting(busy, collector.url):
        last = await answered(busy, "asample", sample(await busy.api.sampler(), 0))
        assert not collector.trace(last)
    assert "sample" in collector.trace(last)


async def test_a_collector_that_is_down_costs_no_work_and_one_line_and_gets_all_later(
    busy: Waiting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(random, "uniform", lambda *_: 0.01)  # of the exporter's pauses
    problems, report = list[str | None](), SpanExport._report
    monkeypatch.setattr(
        SpanExport, "_report", lambda self, problem: (problems.append(problem), report(self, problem))
    )
    with collecting() as free:
        port = int(free.url.rpartition(":")[2])
    async with exporting(busy, f"http://name:password@127.0.0.1:{port}"):
        model = await ready_model(busy.api)
        steps = [await answered(busy, "optim_step", step(model, number)) for number in (1, 2, 3)]
        with settled():
            await until(lambda: len(problems), (4).__le__)
        (line,) = lines(caplog)
        assert f"no traces reach the collector 127.0.0.1:{port}, and work goes on: " in line
        assert "refused" in line
        assert "password" not in line
        with collecting(port) as collector:
            for request in steps:
                assert {"optim_step", "wait", "run"} <= (await arrived(collector, request)).keys()
            await until(lambda: len(lines(caplog)) == 2)
    assert f"traces reach the collector 127.0.0.1:{port} again" in lines(caplog)[1]


async def test_a_collector_that_refuses_is_named_with_its_reason_and_gets_all_later(
    busy: Waiting, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 401
    async with exporting(busy, collector.url):
        request = await answered(busy, "asample", sample(await busy.api.sampler(), 0))
        with settled():
            await until(lambda: collector.refused > 2)
        (line,) = lines(caplog)
        assert "401" in line
        collector.status = 200
        assert "sample" in await arrived(collector, request)


async def test_a_collector_that_never_answers_holds_up_neither_work_nor_the_end(
    busy: Waiting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export is still waiting for it at the end: no failure was logged."""
    monkeypatch.setattr(otlp_export, "LAST_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with exporting(busy, f"http://127.0.0.1:{silent.getsockname()[1]}"):
            model = await ready_model(busy.api)
            await answered(busy, "optim_step", step(model, 1))
            await until(lambda: select.select([silent], [], [], 0)[0])
            for number in (2, 3):
                await answered(busy, "optim_step", step(model, number))
        assert lines(caplog) == []


async def test_what_waits_for_a_collector_is_bounded(
    busy: Waiting, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp_export, "KEEP_S", 0.0)
    monkeypatch.setattr(otlp_export, "MOST", 2)
    collector.status = 401
    async with exporting(busy, collector.url) as export:
        old = await answered(busy, "asample", sample(await busy.api.sampler(), 0))
        with settled():
            await until(lambda: export._cursor == 1)
        monkeypatch.setattr(otlp_export, "KEEP_S", 600.0)
        sampler = await busy.api.sampler()
        requests = [await answered(busy, "asample", sample(sampler, number)) for number in range(4)]
        collector.status = 200
        found = [await arrived(collector, request) for request in requests]
        assert ["run" in spans for spans in found] == [False, False, True, True]
        assert not collector.trace(old)
        await until(lambda: export._parts == {})


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of exports, by us or by the exporter."""
    told = [record for record in caplog.records if "otlp" in record.name]
    return [record.getMessage() for record in told]
