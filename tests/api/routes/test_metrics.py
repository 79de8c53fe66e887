"""/metrics: what the API counts, and who may read it."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY, AsyncMock, Mock

import httpx
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from skyrl_tinker.api.loop_watch import BEAT_S, LoopWatch
from skyrl_tinker.api.middleware import request_metrics
from skyrl_tinker.api.waiting import kept_value
from tests.api.support.engine_socket import engine
from tests.api.support.users import new_user
from tests.api.support.world import World, new_home, running, sample
from tests.support.waiting import until

Samples = dict[tuple[str, ...], float]


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    """Outside /api/v1."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(world.app), base_url="http://api") as made:
        yield made


@pytest.fixture
def never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_value, "KEPT_S", 0.0)


async def scraped(http: httpx.AsyncClient, name: str) -> Samples:
    """Samples by their labels' values."""
    text = (await http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    found = (each for family in families for each in family.samples)
    return {tuple(each.labels.values()): each.value for each in found if each.name == f"skyrl_tinker_{name}"}


@pytest.mark.usefixtures("never_kept")
async def test_every_request_counts_under_the_template_of_its_route(
    world: World, http: httpx.AsyncClient
) -> None:
    model = await world.model()
    for run in (model, "nobody:train:0"):
        await world.http.get(f"training_runs/{run}")
    await http.get("/dashboard/no-such-page.js")
    for path in ("/nowhere", "/api/v1/nowhere", "/api/v1/training_runs"):
        await http.get(path)
    await http.request("BREW", "/nowhere")
    await world.http.post("asample", content=b"{")
    counts = await scraped(http, "http_request_seconds_count")
    run = "/api/v1/training_runs/{run}"
    assert counts == {
        ("POST", "/api/v1/create_session", "2xx"): 1,
        ("POST", "/api/v1/create_model", "2xx"): 1,
        ("POST", "/api/v1/asample", "4xx"): 1,  # answered without FastAPI's router
        ("GET", run, "2xx"): 1,
        ("GET", run, "4xx"): 1,
        ("GET", "/api/v1/training_runs", "2xx"): 1,
        ("GET", "/dashboard/{path}", "4xx"): 1,
        ("GET", "other", "4xx"): 2,
        ("other", "other", "4xx"): 1,
    }


@pytest.mark.usefixtures("never_kept")
async def test_what_is_refused_before_it_is_routed_counts_too(world: World, http: httpx.AsyncClient) -> None:
    await new_user(world, "alice")
    assert (await http.get("/api/v1/sessions")).status_code == 401
    assert (await http.get("/api/v1/sessions/secret-id")).status_code == 401
    counts = await scraped(http, "http_request_seconds_count")
    assert counts == {("GET", "/api/v1/sessions", "4xx"): 1, ("GET", "other", "4xx"): 1}


@pytest.mark.usefixtures("never_kept")
async def test_a_long_poll_counts_with_its_wait(world: World, http: httpx.AsyncClient) -> None:
    sampler, began = await world.sampler(), time.perf_counter()
    accepted = await world.ok("asample", sample(sampler, 0))
    accepted_s = time.perf_counter() - began
    assert (await world.retrieve(accepted["request_id"])).status_code == 408
    sums = await scraped(http, "http_request_seconds_sum")
    assert sums["POST", "/api/v1/retrieve_future", "4xx"] >= world.settings.timeouts.long_poll_s
    assert sums["POST", "/api/v1/asample", "2xx"] < accepted_s


async def test_an_error_of_ours_counts_as_such_and_goes_on() -> None:
    broken, services = AsyncMock(side_effect=ZeroDivisionError), Mock()
    app = SimpleNamespace(state=SimpleNamespace(services=services))
    layer = request_metrics.RequestMetricsMiddleware(broken, ())
    scope = {"type": "http", "method": "GET", "path": "/", "app": app}
    with pytest.raises(ZeroDivisionError):
        await layer(scope, broken, broken)
    services.metrics.requested.assert_called_once_with("GET", "other", "5xx", ANY)


@pytest.mark.usefixtures("never_kept")
async def test_a_block_of_the_loop_stays_visible_to_the_second_scraper(
    world: World, http: httpx.AsyncClient
) -> None:
    world.services.metrics.blocked(3600.0)
    for _ in range(2):
        buckets = await scraped(http, "api_loop_block_seconds_bucket")
        assert buckets["+Inf",] - buckets["10.0",] >= 1


@pytest.mark.usefixtures("never_kept")
async def test_the_loop_is_watched_all_the_time(http: httpx.AsyncClient) -> None:
    async def beats() -> float:
        return (await scraped(http, "api_loop_block_seconds_count"))[()]

    first = await beats()
    await until(beats, lambda count: count > first + 1)


async def test_a_block_counts_once_and_less_one_beat() -> None:
    now, reports = 0.0, list[float]()
    watching = asyncio.create_task(LoopWatch(reports.append, lambda: now).run())
    await until(lambda: reports)
    now = 0.3
    await until(lambda: reports[-1])
    await until(lambda: not reports[-1])
    watching.cancel()
    assert list(filter(None, reports)) == [0.3 - BEAT_S]


async def test_ten_scrapers_cost_one(world: World, http: httpx.AsyncClient) -> None:
    world.patch.setattr(kept_value, "KEPT_S", 3600.0)
    asked = 0

    async def handler(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(text=f"something {asked}\n")

    async with engine(world, web.get("/metrics", handler)):
        pages = await asyncio.gather(*(http.get("/metrics") for _ in range(10)))
        assert {page.text.splitlines()[-1] for page in pages} == {"something 1"}
        world.patch.setattr(kept_value, "KEPT_S", 0.0)
        assert (await http.get("/metrics")).text.splitlines()[-1] == "something 2"
    assert asked == 2


@pytest.mark.usefixtures("never_kept")
async def test_metrics_say_whether_the_engine_is_up(world: World, http: httpx.AsyncClient) -> None:
    await world.set_engine("restarting")
    lines = (await http.get("/metrics")).text.splitlines()
    assert {"skyrl_tinker_engine_up 0.0", "skyrl_tinker_ready 0.0"} <= set(lines)

    async def handler(_: web.Request) -> web.Response:
        return web.Response(text="something 1\n")

    await world.set_engine("ready")
    async with engine(world, web.get("/metrics", handler)):
        lines = (await http.get("/metrics")).text.splitlines()
    assert {"skyrl_tinker_engine_up 1.0", "skyrl_tinker_ready 1.0", "something 1"} <= set(lines)


@pytest.mark.parametrize("metrics_key", [False, True])
async def test_a_setting_asks_for_an_admin_key(tmp_path: Path, *, metrics_key: bool) -> None:
    async with running(new_home(tmp_path / "home", metrics_key=metrics_key)) as world:
        alice = await new_user(world, "alice")
        root = await new_user(world, "root", admin=True)

        async def status(**headers: str) -> int:
            return (await world.http.get("http://api/metrics", headers=headers)).status_code

        found = [await status(), await status(**{"X-API-Key": alice}), await status(**{"X-API-Key": root})]
        bearer = await status(Authorization=f"Bearer {root}")  # as Prometheus sends it
    assert found == ([401, 403, 200] if metrics_key else [200, 200, 200])
    assert bearer == 200
