"""Metrics of several replicas, and of both engines, as one text. The replicas are scripted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from skyrl_tinker.inference.client import replica_metrics as subject
from skyrl_tinker.inference.client.http_connection import JsonHttp
from skyrl_tinker.inference.sglang.sglang_dialect import SGLANG
from skyrl_tinker.inference.vllm.vllm_dialect import VLLM
from tests.support.loop_time import skip
from tests.support.waiting import until


def vllm(tokens: float, kind: type[Counter] | type[Gauge] = Counter) -> str:
    """The text of a vLLM whose engine generated so many tokens."""
    registry = CollectorRegistry()
    labels = {"model_name": "tiny", "engine": "0"}
    generated = kind("vllm:generation_tokens", "Tokens.", list(labels), registry=registry)
    generated.labels(**labels).inc(tokens)
    latency = Histogram("vllm:e2e_request_latency_seconds", "Time.", list(labels), registry=registry)
    latency.labels(**labels).observe(0.2)
    adapters = Gauge("vllm:lora_requests_info", "Adapters.", ["running_lora_adapters"], registry=registry)
    adapters.labels("v1,v2").set(1)
    Gauge("process_open_fds", "Files.", registry=registry).set(9)
    Gauge("skyrl_tinker_ready", "Not its business.", registry=registry).set(0)
    return generate_latest(registry).decode()


def joined(texts: dict[str, str]) -> bytes:
    return subject.joined({name: (text, VLLM) for name, text in texts.items()})


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """By name and replica; of buckets only the last."""
    families = text_string_to_metric_families(text.decode())
    found = [each for family in families for each in family.samples]
    return {
        (each.name, each.labels["replica"]): each.value
        for each in found
        if each.labels.get("le", "+Inf") == "+Inf"
    }


def test_each_sample_says_whose_it_is() -> None:
    text = joined({"0": vllm(5), "2": vllm(7)})
    expected = {}
    for replica, tokens in (("0", 5.0), ("2", 7.0)):
        expected["vllm:generation_tokens_total", replica] = tokens
        for name, value in (("bucket", 1.0), ("count", 1.0), ("sum", 0.2)):
            expected[f"vllm:e2e_request_latency_seconds_{name}", replica] = value
    assert samples(text) == expected
    assert b'vllm:generation_tokens_total{engine="0",model_name="tiny",replica="2"} 7.0' in text


def test_each_engine_is_read_by_its_own_names() -> None:
    other = vllm(7).replace("vllm:", "sglang:")
    found = samples(subject.joined({"0": (vllm(5), VLLM), "1-0": (other + vllm(9), SGLANG)}))
    assert found["vllm:generation_tokens_total", "0"] == 5
    assert found["sglang:generation_tokens_total", "1-0"] == 7
    assert ("vllm:generation_tokens_total", "1-0") not in found


def test_each_family_is_told_once() -> None:
    lines = joined({"0": vllm(5), "1": vllm(7)}).decode().splitlines()
    told = [line for line in lines if line.startswith("#")]
    assert len(told) == len(set(told)) == 4


def test_another_type_of_the_same_name_is_left_out() -> None:
    odd = vllm(7, Gauge).replace("vllm:generation_tokens", "vllm:waiting")
    other = vllm(5).replace("vllm:generation_tokens", "vllm:waiting")
    assert ("vllm:waiting_total", "1") not in samples(joined({"0": odd, "1": other}))


@pytest.mark.parametrize("text", ["", "no metrics\n", 'vllm:x{a="b" 1\n'])
def test_a_text_that_is_none_does_no_harm(text: str) -> None:
    assert samples(joined({"0": text, "1": vllm(7)})) == samples(joined({"1": vllm(7)}))


@asynccontextmanager
async def serving(handler: object) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.get("/metrics", handler)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    yield f"http://{host}:{port}"
    await runner.cleanup()


class Counted(JsonHttp):
    """`ended`: calls that have returned or failed."""

    ended = 0

    async def text(self, url: str) -> str:
        try:
            return await super().text(url)
        finally:
            self.ended += 1


async def test_replicas_that_are_gone_hang_or_refuse_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "WITHIN_S", 3600.0)

    async def good(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        return web.Response(text=vllm(5))

    async def hangs(_: web.Request) -> web.Response:
        return await asyncio.get_running_loop().create_future()

    async def refuses(_: web.Request) -> web.Response:
        return web.Response(status=401, text=vllm(5))

    http = Counted("secret")
    async with serving(good) as first, serving(hangs) as second, serving(refuses) as third:
        urls = {0: first, 1: second, 2: third, 3: "http://127.0.0.1:9"}
        of_bases = [(http, urls, VLLM), (http, {0: first}, VLLM)]
        reading = asyncio.create_task(subject.replica_metrics(of_bases))
        await until(lambda: http.ended == 4)
        skip(subject.WITHIN_S)
        text = await reading
    await http.close()
    assert {replica for _, replica in samples(text)} == {"0", "1-0"}
