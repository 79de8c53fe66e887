#!/usr/bin/env python3
"""Many tenants who train and sample while processes are killed: does anything fail, grow or slow down.

usage: scripts/bench/tenants.py [--full] [--tenants N] [--seconds S] [--kills N] [--rate R] [--seed N]

It starts a server. Each tenant has two sessions with an adapter of rank 4 each, which is saved for sampling
at once: the work is the same from the first second to the last. A session trains (one forward_backward and an
optim_step, sent together), saves its weights for sampling and goes on with these, or samples 8 tokens, and
then is idle for a time drawn so that all sessions together do --rate operations per second. What does not
arrive is sent again, with the same seq_id, as the SDK does. --full: 1,000 tenants for an hour, 10 kills.

Errors are requests that failed, samples of another length than asked for, and steps that the optimizer did
not count by one. `first` and `last` are seconds of operations in the first and the last tenth of the time, of
those that no kill and no recovery overlaps.

Needs the packages of `scripts/setup tests`. With the default arguments it ends within six minutes.
Prints, as its last line, one JSON object: errors; operations; p50_ratio, p99_ratio: last / first; rss_growth:
end / after the first tenth, of the kind of process that grew most; killed: each kill with the seconds until
the server had recovered; and what else was counted. `missed` names the bars that were not held, which make
the exit code 1.
"""

import argparse
import asyncio
import itertools
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
from client import random_tokens
from serving import judged, options_of
from soak import Kill, Killer, Sizes, percentile, serving_apart

from tests.support.serve import Serve

DEFAULT, FULL = (20, 180.0, 2), (1000, 3600.0, 10)  # tenants, seconds, kills
RATE = 12.0
SESSIONS, OPENED_AT_ONCE = 2, 16
PROMPT, TOKENS = 16, 8
HEARTBEAT_S, AGAIN_S, RESULT_S, SETTLE_S = 10.0, 0.5, 600.0, 10.0
SLOWER, SLOWER_SHORT = {"p50": 1.1, "p99": 1.1}, {"p50": 1.5}
"""Bars of last / first. Of a short run there are too few for a p99, and the machine's noise is more."""
RSS_GROWTH, RSS_GROWTH_SHORT = 1.15, 1.5
"""A short run is still filling caches: primitives of oneDNN, pools of connections, adapters."""
SETTINGS = "retention = {results_s = 60}\nephemeral = {keep = 2, idle_s = 60}\n"
Json = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """`kind`: train, sample or save; `began`, `ended`: of the monotonic clock."""

    kind: str
    began: float
    ended: float


class Tenants:
    """All sessions of one server, and what they did."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.operations: list[Operation] = []
        self.errors: list[str] = []
        self.sessions: list[str] = []
        self._http = http

    async def keep_alive(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            beats = [self.post("session_heartbeat", {"session_id": each}) for each in self.sessions]
            await asyncio.gather(*beats)

    async def timed(self, kind: str, work: Awaitable[None]) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(RESULT_S):
                await work
        except Exception as error:  # counted: none is expected
            self.require(False, f"{type(error).__name__}: {error}")
        else:
            self.operations.append(Operation(kind, began, time.monotonic()))

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.errors.append(message)
            print(f"error: {message}", flush=True)

    async def post(self, path: str, body: Json) -> Json:
        """Return the answer; send it again while the server is away or has no room."""
        while True:
            try:
                async with self._http.post(f"/api/v1/{path}", json=body) as response:
                    answer = await response.json(content_type=None)
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(AGAIN_S)
                continue
            if response.status == 200:
                return dict(answer)
            if response.status not in (408, 429) and response.status < 500:
                raise RuntimeError(f"{path}: {response.status} {answer}")
            await asyncio.sleep(0 if response.status == 408 else AGAIN_S)

    async def result(self, path: str, body: Json) -> Json:
        accepted = await self.post(path, body)
        found = await self.post("retrieve_future", {"request_id": accepted["request_id"]})
        if "error" in found:
            raise RuntimeError(f"{path}: {found['error']}")
        return found


class Session:
    """One adapter that trains, and its sampler."""

    def __init__(self, tenants: Tenants, model: str) -> None:
        self._tenants = tenants
        self._model, self._sampler = model, ""
        self._steps = 0
        self._seq_ids = itertools.count(1)
        self._samples, self._samplers = itertools.count(), itertools.count()

    @classmethod
    async def open(cls, tenants: Tenants) -> "Session":
        created = await tenants.post("create_session", {"sdk_version": "0.38.0"})
        session = str(created["session_id"])
        tenants.sessions.append(session)
        lora = {"rank": 4, "train_mlp": True, "train_attn": True, "train_unembed": True}
        model = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        model_id = (await tenants.result("create_model", model))["model_id"]
        opened = cls(tenants, model_id)
        await opened._save()
        return opened

    async def work(self, draw: random.Random, idle_s: float, until: float) -> None:
        works: dict[str, Callable[[], Awaitable[None]]] = {
            "train": self._train,
            "sample": self._sample,
            "save": self._save,
        }
        while (now := time.monotonic()) < until:
            await asyncio.sleep(min(draw.expovariate(1 / idle_s), until - now))
            if time.monotonic() < until:
                kind = draw.choices(list(works), (4, 8, 1))[0]
                await self._tenants.timed(kind, works[kind]())

    async def _train(self) -> None:
        tokens = random_tokens(PROMPT)
        weights = {"data": [1.0] * PROMPT, "dtype": "float32", "shape": [PROMPT]}
        targets = {"data": tokens, "dtype": "int64", "shape": [PROMPT]}
        datum = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "loss_fn_inputs": {"target_tokens": targets, "weights": weights},
        }
        passed = {
            "model_id": self._model,
            "seq_id": next(self._seq_ids),
            "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"},
        }
        step = {
            "model_id": self._model,
            "seq_id": next(self._seq_ids),
            "adam_params": {"learning_rate": 1e-4},
        }
        _, done = await asyncio.gather(
            self._tenants.result("forward_backward", passed), self._tenants.result("optim_step", step)
        )
        self._steps += 1
        count = done["metrics"]["optimizer_step"]
        self._tenants.require(count == self._steps, f"{count} steps of {self._model}, not {self._steps}")

    async def _save(self) -> None:
        body = {
            "model_id": self._model,
            "seq_id": next(self._seq_ids),
            "sampling_session_seq_id": next(self._samplers),
        }
        found = await self._tenants.result("save_weights_for_sampler", body)
        self._sampler = found["sampling_session_id"]

    async def _sample(self) -> None:
        body = {
            "sampling_session_id": self._sampler,
            "seq_id": next(self._samples),
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": random_tokens(PROMPT)}]},
            "sampling_params": {"max_tokens": TOKENS, "stop": []},
        }
        found = await self._tenants.result("asample", body)
        count = len(found["sequences"][0]["tokens"])
        self._tenants.require(count == TOKENS, f"a sample of {count} tokens")


async def open_all(tenants: Tenants, count: int) -> list[Session]:
    places = asyncio.Semaphore(OPENED_AT_ONCE)

    async def opened() -> Session:
        async with places:
            return await Session.open(tenants)

    return await asyncio.gather(*(opened() for _ in range(count)))


# The report


def undisturbed(operations: Sequence[Operation], kills: Sequence[Kill]) -> list[Operation]:
    """Return those that no kill, recovery or SETTLE_S after it overlaps."""
    return [
        each
        for each in operations
        if all(each.ended < kill.began or each.began > kill.healed + SETTLE_S for kill in kills)
    ]


def _seconds(operations: Sequence[Operation], kind: str | None = None) -> list[float]:
    return [each.ended - each.began for each in operations if kind in (None, each.kind)]


def _milliseconds(operations: Sequence[Operation], share: float, kind: str) -> int | None:
    seconds = _seconds(operations, kind)
    return round(1000 * percentile(seconds, share)) if seconds else None


def report(
    tenants: Tenants,
    kills: Sequence[Kill],
    began: float,
    seconds: float,
    rss_mb: Sequence[dict[str, float]],
    full: bool,
) -> Json:
    """`rss_mb`: after the first tenth and at the end, by kind of process."""
    quiet = undisturbed(tenants.operations, kills)
    tenth = seconds / 10
    kinds = sorted({each.kind for each in quiet})
    tenths = [
        [each for each in quiet if number <= (each.began - began) / tenth < number + 1]
        for number in range(10)
    ]
    filled = [_seconds(each) for each in tenths if each]
    first, last = (
        {"p50": percentile(each, 0.5), "p99": percentile(each, 0.99)} for each in (filled[0], filled[-1])
    )
    ratios = {name: round(last[name] / first[name], 3) for name in first}
    warm, end = rss_mb
    growth = {kind: round(end[kind] / mb, 3) for kind, mb in warm.items() if kind in end}
    missed = [
        f"{name}: {ratios[name]}"
        for name, most in (SLOWER if full else SLOWER_SHORT).items()
        if ratios[name] > most
    ]
    most = RSS_GROWTH if full else RSS_GROWTH_SHORT
    missed += [f"rss of {kind}: {ratio}" for kind, ratio in growth.items() if ratio > most]
    return {
        "errors": len(tenants.errors),
        "operations": len(tenants.operations),
        "sessions": len(tenants.sessions),
        "p50_ratio": ratios["p50"],
        "p99_ratio": ratios["p99"],
        "rss_growth": max(growth.values()),
        "kills": len(kills),
        "killed": [f"{kill.kind} {kill.healed - kill.began:.0f} s" for kill in kills],
        "p50_ms_by_tenth": {kind: [_milliseconds(each, 0.5, kind) for each in tenths] for kind in kinds},
        "p99_ms_by_tenth": {kind: [_milliseconds(each, 0.99, kind) for each in tenths] for kind in kinds},
        "rss_mb": {kind: [round(mb), round(end.get(kind, 0))] for kind, mb in warm.items()},
        "missed": [*(["errors"] if tenants.errors else []), *missed],
    }


async def run(serve: Serve, arguments: argparse.Namespace) -> Json:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(serve.url, connector=connector, timeout=aiohttp.ClientTimeout()) as http:
        tenants = Tenants(http)
        alive = asyncio.create_task(tenants.keep_alive())
        count = SESSIONS * arguments.tenants
        opening = time.monotonic()
        sessions = await open_all(tenants, count)
        print(f"{count} sessions are open after {time.monotonic() - opening:.0f} s", flush=True)
        every_s = arguments.seconds / (arguments.kills + 1) if arguments.kills else threading.TIMEOUT_MAX
        killer = Killer(serve, every_s, arguments.seed)
        began = time.monotonic()
        until = began + arguments.seconds
        draws = [random.Random(f"{arguments.seed} {number}") for number in range(count)]
        pairs = zip(sessions, draws, strict=True)
        working = [
            asyncio.create_task(each.work(draw, count / arguments.rate, until)) for each, draw in pairs
        ]
        killer.start()
        await asyncio.sleep(arguments.seconds / 10)
        warm = await asyncio.to_thread(Sizes, serve)
        await asyncio.gather(*working)
        await asyncio.to_thread(killer.stop)
        end = await asyncio.to_thread(Sizes, serve)
        alive.cancel()
        return report(
            tenants, killer.kills, began, arguments.seconds, (warm.rss_mb, end.rss_mb), full=arguments.full
        )


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--full", action="store_true", help="1,000 tenants, an hour, 10 kills, its bars")
    parser.add_argument("--tenants", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--rate", type=float, default=RATE, help="operations per second of all sessions")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tenants, seconds, kills = FULL if arguments.full else DEFAULT
    arguments.tenants = arguments.tenants or tenants
    arguments.seconds = arguments.seconds or seconds
    arguments.kills = kills if arguments.kills is None else arguments.kills
    with serving_apart(SETTINGS) as serve:
        return judged(asyncio.run(run(serve, arguments)))


if __name__ == "__main__":
    sys.exit(main())
