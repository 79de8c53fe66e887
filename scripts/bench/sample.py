#!/usr/bin/env python3
"""Sampling throughput and latency through our API against the bare sampling server, in the same run.

usage: scripts/bench/sample.py [--engine vllm|sglang] [--sampler-python PATH]
                               [--base-url URL --sampler-url URL] [--base-model NAME] [--seconds N]
                               [--tokens N]

The bare server's token is read from SKYRL_TINKER_SAMPLER_TOKEN if it asks for one and --sampler-url is given.
Without URLs it starts `skyrl-tinker serve` in a temporary home and finds its sampling server;
--sampler-python is the interpreter of that, where it is not ours. Both sides get the same prompts from the
same plain HTTP client, in turns, so that what else the machine does hits both; `sdk` is the same work
through the tinker SDK, whose own work shares the machine's cores. A request samples 256 tokens, as many as
the cookbook's rl_loop asks for, and 16 with SGLang, which is slow on a CPU; --tokens changes that. With its
defaults it takes four to six minutes on 2 cores; --seconds is the time for the comparison, of which every
side has at least one turn.
Publish-to-first-token: from `save_weights_and_get_sampling_client` to one sampled token, through the SDK.
Prints tables and, as its last line, one JSON object. cpu_ms_xN: CPU milliseconds of each kind of process per
sample of each side, with N at once; a busy machine hardly moves them. `client` is this process, and all that
is known where URLs are given.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
import tinker
from client import options, random_datum, random_prompt, random_tokens
from serving import served
from start import kind_of, tree
from tinker import types

from skyrl_tinker.engine.scheduling.slots import ALONE_S
from skyrl_tinker.inference.client.http_connection import bearer
from skyrl_tinker.inference.constants import TOKEN

PROMPT = 64
TURNS = {1: (4, 0.35), 8: (120, 0.1), 64: (384, 0.2), 512: (1024, 0.35)}
"""Requests that each side makes before the next has its turn, and the share of the time, by concurrency. One
at a time the difference of the two sides is a hundredth of either, so they change places often."""
SLOW_TURNS = {1: (4, 0.35), 8: (16, 0.1), 64: (64, 0.2), 512: (512, 0.35)}
"""Those of an engine that samples a tenth as fast on a CPU."""
WARM_UP = 64
APART_S = 2 * ALONE_S
"""Pause between the turns of crowds: the sessions of two sides at once would have fewer places on a CPU."""
HEARTBEAT_S = 10.0
Ask = Callable[[list[int]], Awaitable[None]]


@dataclass
class Figures:
    """All turns of one side at one concurrency."""

    turns: list[list[float]] = field(default_factory=list)  # seconds of each request
    rates: list[float] = field(default_factory=list)  # requests per second of each turn
    cpu_s: dict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # of all turns, by kind of process

    @property
    def p50_ms(self) -> float:
        return 1000 * statistics.median(seconds for turn in self.turns for seconds in turn)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def cpu_ms(self) -> dict[str, float]:
        """Return CPU time per request by kind of process, the dearest first."""
        requests = sum(map(len, self.turns))
        dearest = sorted(self.cpu_s.items(), key=lambda item: -item[1])
        return {kind: round(1000 * spent / requests, 3) for kind, spent in dearest if spent > 0}


# The two sides


@dataclass(frozen=True)
class Sampler:
    """The bare server. `token`: what it asks for, empty for nothing."""

    url: str
    token: str = ""


def vllm_request(model: str, tokens: int) -> tuple[str, dict[str, Any], str]:
    """Return the path, the body without the prompt, and the prompt's field."""
    params = {"max_tokens": tokens, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    return "/inference/v1/generate", {"model": model, "sampling_params": params}, "token_ids"


def sglang_request(_: str, tokens: int) -> tuple[str, dict[str, Any], str]:
    params = {"max_new_tokens": tokens, "ignore_eos": True}
    return "/generate", {"sampling_params": params, "return_logprob": True}, "input_ids"


@dataclass(frozen=True)
class Engine:
    """`entry`: the end of the argument that names its server's program."""

    entry: str
    request: Callable[[str, int], tuple[str, dict[str, Any], str]]
    turns: dict[int, tuple[int, float]]
    tokens: int


ENGINES = {
    "vllm": Engine("vllm.vllm_entry", vllm_request, TURNS, 256),
    "sglang": Engine("sglang_entry.py", sglang_request, SLOW_TURNS, 16),
}


def bare(http: aiohttp.ClientSession, sampler: Sampler, engine: Engine, model: str, tokens: int) -> Ask:
    path, rest, prompt = engine.request(model, tokens)

    async def ask(tokens: list[int]) -> None:
        body = {**rest, prompt: tokens}
        async with http.post(sampler.url + path, json=body, headers=bearer(sampler.token)) as response:
            response.raise_for_status()
            await response.json()

    return ask


def ours(http: aiohttp.ClientSession, url: str, sampling_session: str, tokens: int) -> Ask:
    numbers = itertools.count()
    params = {"max_tokens": tokens, "stop": []}
    protobuf = {"Accept": "application/x-protobuf"}

    async def ask(tokens: list[int]) -> None:
        body = {
            "sampling_session_id": sampling_session,
            "seq_id": next(numbers),
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "sampling_params": params,
        }
        async with http.post(f"{url}/api/v1/asample", json=body) as response:
            response.raise_for_status()
            wanted = {"request_id": (await response.json())["request_id"]}
        status = 408
        while status == 408:
            async with http.post(f"{url}/api/v1/retrieve_future", json=wanted, headers=protobuf) as response:
                await response.read()
                status = response.status
        assert response.headers["Content-Type"] == protobuf["Accept"], status

    return ask


def through_sdk(sampler: tinker.SamplingClient, tokens: int) -> Ask:
    params = types.SamplingParams(max_tokens=tokens, stop=[])

    async def ask(tokens: list[int]) -> None:
        await sampler.sample(types.ModelInput.from_ints(tokens), 1, params)

    return ask


# Measuring


async def round_of(ask: Ask, concurrency: int, requests: int, figures: Figures) -> None:
    left = iter(range(requests))
    seconds: list[float] = []
    figures.turns.append(seconds)

    async def worker() -> None:
        for _ in left:
            start = time.perf_counter()
            await ask(random_tokens(PROMPT))
            seconds.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    figures.rates.append(requests / (time.perf_counter() - start))


def cpu_s(server: int | None) -> dict[str, float]:
    """Return the CPU seconds by kind of process until now; `server`: pid of serve, None if it is not ours."""
    spent = defaultdict(float, client=time.process_time())
    for process in [] if server is None else tree(server):
        with suppress(psutil.NoSuchProcess):
            spent[kind_of(process)] += sum(process.cpu_times()[:2])
    return spent


async def throughput(
    sides: dict[str, Ask], turns: dict[int, tuple[int, float]], seconds: float, server: int | None
) -> dict[int, dict[str, Figures]]:
    results: dict[int, dict[str, Figures]] = {}
    for concurrency, (requests, share) in turns.items():
        results[concurrency] = {name: Figures() for name in sides}
        end = time.perf_counter() + seconds * share
        for ask in sides.values():
            await round_of(ask, concurrency, min(concurrency, WARM_UP), Figures())
        while not results[concurrency]["sdk"].rates or time.perf_counter() < end:
            for name, ask in sides.items():
                await asyncio.sleep(APART_S if concurrency > WARM_UP else 0)
                before = cpu_s(server)
                await round_of(ask, concurrency, requests, results[concurrency][name])
                for kind, spent in cpu_s(server).items():
                    results[concurrency][name].cpu_s[kind] += spent - before.get(kind, 0.0)
    return results


def publish_to_first_token(service: tinker.ServiceClient, base_model: str, rank: int, repeats: int) -> float:
    """p50 in ms; every version differs from the one before. rank 0: full parameters."""
    training = service.create_lora_training_client(base_model=base_model, rank=rank).result()
    datum = random_datum(PROMPT)
    one = types.SamplingParams(max_tokens=1)
    figures = []
    for number in range(repeats + 2):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        start = time.perf_counter()
        sampler = training.save_weights_and_get_sampling_client().result()
        sampler.sample(random_prompt(PROMPT), 1, one).result()
        if number >= 2:
            figures.append(1000 * (time.perf_counter() - start))
    return statistics.median(figures)


# The server


@contextmanager
def both(arguments: argparse.Namespace) -> Iterator[tuple[str, Sampler, int | None]]:
    """URL of the API, its sampling server, and the pid of serve where it is started here."""
    if arguments.base_url and arguments.sampler_url:
        yield arguments.base_url, Sampler(arguments.sampler_url, os.environ.get(TOKEN, "")), None
        return
    python = ["--sampler-python", arguments.sampler_python] if arguments.sampler_python else []
    with served("--sampler-engine", arguments.engine, *python) as (url, pid):
        yield url, sampling_server(pid, ENGINES[arguments.engine].entry), pid


def sampling_server(pid: int, entry: str) -> Sampler:
    for process in psutil.Process(pid).children(recursive=True):
        command = process.cmdline()
        if any(part.endswith(entry) for part in command) and "--port" in command:
            url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
            return Sampler(url, process.environ().get(TOKEN, ""))
    raise SystemExit("found no sampling server below serve: give --base-url and --sampler-url")


@asynccontextmanager
async def sampling_session(http: aiohttp.ClientSession, url: str, base_model: str) -> AsyncIterator[str]:
    """Open a sampling session and keep it alive by heartbeats, as the SDK does."""

    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with http.post(f"{url}/api/v1/{path}", json=body) as response:
            response.raise_for_status()
            return dict(await response.json())

    async def beat(session_id: str) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await post("session_heartbeat", {"session_id": session_id})

    session = await post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "bench"})
    session_id = str(session["session_id"])
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": base_model}
    heartbeat = asyncio.create_task(beat(session_id))
    try:
        yield str((await post("create_sampling_session", sampler))["sampling_session_id"])
    finally:
        heartbeat.cancel()


# Reporting


def report(results: dict[int, dict[str, Figures]], tokens: int) -> dict[str, Any]:
    print(f"{'at once':>8} {'side':<6}{'req/s':>9}{'tokens/s':>10}{'p50 ms':>9}{'ratio':>7}")
    summary: dict[str, Any] = {}
    for concurrency, sides in results.items():
        for name, figures in sides.items():
            ratio = ratio_of(figures, sides["bare"])
            print(
                f"{concurrency:>8} {name:<6}{figures.rate:>9.1f}{figures.rate * tokens:>10.0f}"
                f"{figures.p50_ms:>9.1f}{ratio:>7.2f}"
            )
        summary[f"ratio_x{concurrency}"] = round(ratio_of(sides["ours"], sides["bare"]), 3)
        summary[f"sdk_ratio_x{concurrency}"] = round(ratio_of(sides["sdk"], sides["bare"]), 3)
        summary[f"tokens_per_s_x{concurrency}"] = round(sides["ours"].rate * tokens)
        summary[f"cpu_ms_x{concurrency}"] = {name: figures.cpu_ms for name, figures in sides.items()}
    summary["overhead_p50_ms"] = round(overhead_p50_ms(results[1]["bare"], results[1]["ours"]), 2)
    return summary


def ratio_of(through: Figures, bare: Figures) -> float:
    """Return the median over the turns of the rate beside the bare server's in the turn before.

    Over minutes the machine's own pace moves by more than they differ.
    """
    return statistics.median(own / base for own, base in zip(through.rates, bare.rates, strict=True))


def overhead_p50_ms(bare: Figures, through: Figures) -> float:
    """Return the median over the turns of a request's extra time against the bare server's turn before."""
    turns = zip(bare.turns, through.turns, strict=True)
    return 1000 * statistics.median(statistics.median(own) - statistics.median(base) for base, own in turns)


async def compare(
    service: tinker.ServiceClient,
    url: str,
    bare_sampler: Sampler,
    server: int | None,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    engine = ENGINES[arguments.engine]
    tokens = arguments.tokens or engine.tokens
    sampler = await service.create_sampling_client(base_model=arguments.base_model)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
        sampling_session(http, url, arguments.base_model) as session,
    ):
        sides = {
            "bare": bare(http, bare_sampler, engine, arguments.base_model, tokens),
            "ours": ours(http, url, session, tokens),
            "sdk": through_sdk(sampler, tokens),
        }
        return report(await throughput(sides, engine.turns, arguments.seconds, server), tokens)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--sampler-python", help="the interpreter that has the engine; default: ours")
    parser.add_argument("--sampler-url", help="of its sampling server")
    parser.add_argument("--seconds", type=float, default=200.0, help="for the comparison")
    parser.add_argument("--tokens", type=int, help="sampled per request; default: 256, with SGLang 16")
    arguments = parser.parse_args()
    with (
        both(arguments) as (url, bare_sampler, server),
        tinker.ServiceClient(base_url=url) as service,
    ):
        summary = asyncio.run(compare(service, url, bare_sampler, server, arguments))
        for name, rank in (("publish_lora_ms", 32), ("publish_full_ms", 0)):
            summary[name] = round(publish_to_first_token(service, arguments.base_model, rank, 15), 1)
            print(f"{name}: {summary[name]}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
