#!/usr/bin/env python3
"""Many large forward_backward bodies in flight at once, while sessions heartbeat on other connections.

usage: scripts/bench/ingest.py [--base-url URL] [--base-model NAME] [--bodies N] [--mb N] [--datums N]
                               [--train]

Without a URL it starts a server of its own. Each of 16 models gets its share of the bodies, all at once and
in shuffled order. As an SDK does with the chunks of one call, the first of a model is left for last: so
nothing of it is trained while the rest arrives, and only the ingest is measured. --train sends the first
ones with the others: then the engine trains meanwhile, on the same cores.

The longest block of the API's event loop is what its own /metrics tell
(skyrl_tinker_api_loop_block_seconds: how late the loop was to wake a task every 10 ms): the upper bound of
its bucket; a block may show up to 10 ms too short.

Prints, as its last line, one JSON object: total_s until the last body is accepted, heartbeat_p99_ms,
loop_block_below_ms, and more.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import random
import re
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import numpy as np
from serving import options_of, served

from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb

MODELS = 16
BEAT_EVERY_S = 0.05
PIECE = 1 << 18
BYTES_PER_TOKEN = 20  # token, target, log-probability, advantage
NO_LIMIT = aiohttp.ClientTimeout()
BLOCKS = re.compile(r'^skyrl_tinker_api_loop_block_seconds_bucket{le="(\S+)"} (\S+)$', re.MULTILINE)
CACHED_S = 1.0


@dataclass(frozen=True)
class Body:
    """One request: what names it, and the data that all of them share."""

    name: bytes
    data: memoryview

    @property
    def size(self) -> int:
        return len(self.name) + len(self.data)

    async def pieces(self) -> AsyncIterator[bytes]:
        yield self.name
        for start in range(0, len(self.data), PIECE):
            yield bytes(self.data[start : start + PIECE])


def random_data(datums: int, tokens: int) -> memoryview:
    """Return the data of an importance_sampling pass."""
    source = np.random.default_rng(0)
    message = pb.ForwardBackwardRequest(loss_fn="importance_sampling")
    for _ in range(datums):
        datum = message.data.add()
        ids = source.integers(3, 300, tokens + 1)
        datum.model_input.add().encoded_text.tokens = ids[:-1].astype("<i4").tobytes()
        inputs: tuple[tuple[str, Any, pb.DType], ...] = (
            ("target_tokens", ids[1:].astype("<i8"), pb.DTYPE_INT64),
            ("logprobs", source.normal(-2, 1, tokens).astype("<f4"), pb.DTYPE_FLOAT32),
            ("advantages", source.normal(0, 1, tokens).astype("<f4"), pb.DTYPE_FLOAT32),
        )
        for name, values, dtype in inputs:
            tensor = pb.Tensor(dense=values.tobytes(), dtype=dtype, shape=[tokens])
            datum.loss_fn_inputs[name].CopyFrom(tensor)
    return memoryview(message.SerializeToString())


class Client:
    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._http.post(f"{self._url}/api/v1/{path}", json=body) as answer:
            assert answer.status == 200, f"{path}: {answer.status} {await answer.text()}"
            return await answer.json()

    async def send(self, body: Body) -> float:
        """Seconds until it is accepted."""
        start = time.perf_counter()
        headers = {"Content-Type": "application/x-protobuf", "Content-Length": str(body.size)}
        url = f"{self._url}/api/v1/forward_backward"
        async with self._http.post(url, data=body.pieces(), headers=headers) as answer:
            assert answer.status == 200, f"{answer.status} {await answer.text()}"
        return time.perf_counter() - start

    async def blocks(self) -> dict[float, float]:
        """Return how many blocks the API's loop has had, of at most so many seconds."""
        await asyncio.sleep(CACHED_S)  # or the answer may be an earlier one
        async with self._http.get(f"{self._url}/metrics") as answer:
            found = BLOCKS.findall(await answer.text())
        return {float(bound): float(count) for bound, count in found}

    async def models(self, base_model: str) -> tuple[str, list[str]]:
        """Return a new session and its models."""
        session = (await self.post("create_session", {}))["session_id"]
        return session, [await self._model(session, number, base_model) for number in range(MODELS)]

    async def _model(self, session: str, number: int, base_model: str) -> str:
        wanted = {"session_id": session, "model_seq_id": number, "base_model": base_model}
        made = await self.post("create_model", {**wanted, "lora_config": {"rank": 8}})
        async with self._http.post(f"{self._url}/api/v1/retrieve_future", json=made) as answer:
            assert answer.status in (200, 408), await answer.text()
        return str(made["model_id"])


async def measure(url: str, arguments: argparse.Namespace) -> dict[str, float]:
    tokens = int(arguments.mb * 1e6 / BYTES_PER_TOKEN / arguments.datums)
    data = random_data(arguments.datums, tokens)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=NO_LIMIT, read_bufsize=PIECE
    ) as http:
        client = Client(url, http)
        _, models = await client.models(arguments.base_model)
        bodies = [
            Body(body_name(models[number % MODELS], number // MODELS + (1 if arguments.train else 2)), data)
            for number in range(arguments.bodies)
        ]
        random.Random(0).shuffle(bodies)
        before = await client.blocks()
        with Heartbeats(url) as heartbeats:
            start = time.perf_counter()
            accepted = await asyncio.gather(*(client.send(body) for body in bodies))
            total = time.perf_counter() - start
            beats = heartbeats.stop()
        after = await client.blocks()
    return {
        "bodies": len(bodies),
        "body_mb": round(bodies[0].size / 1e6, 2),
        "accepted_p50_s": round(statistics.median(accepted), 2),
        "heartbeats": len(beats),
        "heartbeat_p50_ms": round(1000 * statistics.median(beats), 1),
        "heartbeat_max_ms": round(1000 * max(beats), 1),
        "total_s": round(total, 2),
        "heartbeat_p99_ms": round(1000 * sorted(beats)[int(0.99 * (len(beats) - 1))], 1),
        "loop_block_below_ms": round(1000 * longest(before, after), 1),
    }


def longest(before: dict[float, float], after: dict[float, float]) -> float:
    """Return the upper bound of the longest block that came between two readings."""
    grown = {bound: after[bound] - before[bound] for bound in after}
    return min(bound for bound in grown if grown[bound] == grown[math.inf])


def body_name(model_id: str, seq_id: int) -> bytes:
    return pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id).SerializeToString()


class Heartbeats:
    """A process of its own, so that what sends the bodies does not delay them."""

    def __init__(self, url: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_beat_until_told, args=(url, theirs), daemon=True)

    def __enter__(self) -> "Heartbeats":
        self._process.start()
        self._ours.recv()  # the first one is through
        return self

    def __exit__(self, *_: object) -> None:
        self._process.join()

    def stop(self) -> list[float]:
        """Seconds that each took."""
        self._ours.send(None)
        beats: list[float] = self._ours.recv()
        return beats


def _beat_until_told(url: str, pipe: Connection) -> None:
    asyncio.run(_beating(url, pipe))


async def _beating(url: str, pipe: Connection) -> None:
    """One every 50 ms, whether the one before was answered or not."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=NO_LIMIT) as http:
        client = Client(url, http)
        session = (await client.post("create_session", {}))["session_id"]
        await _beat(client, session)
        pipe.send(None)
        beats = []
        while not pipe.poll():
            beats.append(asyncio.create_task(_beat(client, session)))
            await asyncio.sleep(BEAT_EVERY_S)
        pipe.send(await asyncio.gather(*beats))


async def _beat(client: Client, session: str) -> float:
    start = time.perf_counter()
    await client.post("session_heartbeat", {"session_id": session})
    return time.perf_counter() - start


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--base-url", help="of a running server; default: one is started")
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--bodies", type=int, default=208)
    parser.add_argument("--mb", type=float, default=3.3, help="10^6 bytes of each body")
    parser.add_argument("--datums", type=int, default=160, help="of each body")
    parser.add_argument("--train", action="store_true")
    arguments = parser.parse_args()
    with nullcontext((arguments.base_url, 0)) if arguments.base_url else served() as (url, _):
        figures = asyncio.run(measure(url, arguments))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
