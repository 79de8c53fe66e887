#!/usr/bin/env python3
"""Full-parameter weight sync: seconds per GB of each transport, and the pause of a running rollout.

usage: scripts/bench/weight_sync.py [--model DIR] [--ranks N] [--replicas N] [--repeats N] [--chunk-mb N]

Starts trainer ranks and vLLM servers by itself (CPU). Without --model it makes one of about 100 MB.
`capture`: from the trainer's shards to host memory, while the trainer waits; `write`: from there to files;
`sync`: from files to serving, or with gloo also `from ranks`, which needs no `write` before it; `paused`: how
long requests stood still; `gap`: the largest time between two tokens of a rollout during a sync, `usual`: the
median.
Prints a table and, as its last line, one JSON object.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import ray
from serving import options_of

from skyrl_tinker import config
from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.servers.replica_spec import SamplerSpec
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess
from skyrl_tinker.server.base_models.base_model import resolve
from skyrl_tinker.server.base_models.tiny_model import make_model
from skyrl_tinker.training.trainer_group import CapturedState, TrainerGroup, TrainerSpec
from skyrl_tinker.weight_sync.factory import TransportName, make_transport
from skyrl_tinker.weight_sync.sync import sync_weights
from skyrl_tinker.weight_sync.transport import WeightSource

MiB = 1 << 20
MODEL = ModelKey(1)
CONTEXT = 4096
TRANSPORTS: tuple[TransportName, ...] = ("shared_memory", "gloo")


@dataclass
class Rollout:
    """One that streams for as long as the context allows; `gaps` in seconds between its tokens."""

    gaps: list[float] = field(default_factory=list)

    async def run(self, url: str) -> None:
        params = {"max_tokens": CONTEXT - 16, "ignore_eos": True, "seed": 1}
        body = {"token_ids": [5, 6, 7, 8], "sampling_params": params, "stream": True}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{url}/inference/v1/generate", json=body) as response,
        ):
            last = None
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    self.gaps += [now - last] if last is not None else []
                    last = now


@asynccontextmanager
async def rolling(url: str) -> AsyncIterator[Rollout]:
    """Run a rollout for as long as the block lasts."""
    rollout = Rollout()
    task = asyncio.create_task(rollout.run(url))
    await asyncio.sleep(0.5)
    try:
        yield rollout
        await asyncio.sleep(0.5)
    finally:
        task.cancel()
        await asyncio.wait((task,))


@dataclass
class World:
    trainer: TrainerGroup
    servers: ServerGroup
    files: Path
    chunk_bytes: int

    async def measure(self, name: TransportName, source: WeightSource, repeats: int) -> dict[str, float]:
        """Medians over the repeats, the first sync (which forms the group) not counted."""
        client = RemoteInferenceClient(self.servers.urls[0], self.servers.urls, dialect=VllmProcess().dialect)
        transport = make_transport(name, self.trainer, self.chunk_bytes)
        await sync_weights(client.control, transport, source, "v")
        rows: list[dict[str, float]] = []
        for _ in range(repeats):
            async with rolling(self.servers.urls[0]) as rollout:
                before = len(rollout.gaps)
                synced = await sync_weights(client.control, transport, source, "v")
            rows.append(
                {
                    "s_per_gb": synced.seconds / synced.size * 1e9,
                    "sync_ms": 1000 * synced.seconds,
                    "paused_ms": 1000 * synced.paused_s,
                    "gap_ms": 1000 * max(rollout.gaps[before:]),
                    "usual_ms": 1000 * statistics.median(rollout.gaps[:before]),
                }
            )
        await client.close()
        return {key: statistics.median(row[key] for row in rows) for key in rows[0]}

    async def capture(self, repeats: int) -> tuple[CapturedState, dict[str, float]]:
        """Return the last capture; milliseconds that the trainer waits, and those in which it trains on."""
        await self.trainer.create_model(MODEL, LoraSpec(0, 0))
        times: list[tuple[float, float]] = []
        captured: CapturedState | None = None
        for _ in range(repeats):
            if captured is not None:
                await captured.drop()
            shutil.rmtree(self.files, ignore_errors=True)
            start = time.perf_counter()
            captured = (await self.trainer.capture_weights({MODEL: False}))[MODEL]
            middle = time.perf_counter()
            await self.trainer.persist_state(captured, str(self.files))
            times.append((1000 * (middle - start), 1000 * (time.perf_counter() - middle)))
        assert captured is not None
        captures, writes = zip(*times, strict=True)
        return captured, {"capture_ms": statistics.median(captures), "write_ms": statistics.median(writes)}


async def run(arguments: argparse.Namespace, home: Path) -> dict[str, float]:
    facts = facts_of(arguments.model or home / "model")
    ranks, chunk = arguments.ranks, arguments.chunk_mb * MiB
    trainer = TrainerGroup.launch(TrainerSpec(facts.directory, ranks, "cpu", "float32", 1, 2048))
    servers = ServerGroup.launch(sampler_spec(facts, home, arguments.replicas))
    try:
        await asyncio.gather(trainer.ready(), servers.ready())
        world = World(trainer, servers, home / "version", chunk)
        captured, times_ms = await world.capture(arguments.repeats)
        size = sum(file.stat().st_size for file in (home / "version").iterdir())
        times = ", ".join(f"{name} {value:.0f}" for name, value in times_ms.items())
        print(f"{size / 1e6:.0f} MB, {ranks} ranks, {arguments.replicas} replicas; {times}")
        figures: dict[str, dict[str, float]] = {
            name: await world.measure(name, world.files, arguments.repeats) for name in TRANSPORTS
        }
        figures["gloo from ranks"] = await world.measure("gloo", captured, arguments.repeats)
    finally:
        await asyncio.gather(trainer.shutdown(), servers.shutdown())
    rounded = {name: round(value, 1) for name, value in times_ms.items()}
    return {"mb": round(size / 1e6), **rounded} | report(figures)


def report(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    columns = list(next(iter(figures.values())))
    print(f"{'':26}" + "".join(f"{column:>12}" for column in columns))
    for name, row in figures.items():
        print(f"{name:26}" + "".join(f"{row[column]:12.2f}" for column in columns))
    return {
        f"{name.replace(' ', '_')}_{column}": round(row[column], 2)
        for name, row in figures.items()
        for column in columns
    }


def facts_of(directory: Path) -> BaseModelFacts:
    return resolve(config.load(base_model=str(directory), context_length=CONTEXT))


def sampler_spec(facts: BaseModelFacts, home: Path, replicas: int) -> SamplerSpec:
    return SamplerSpec(
        model=facts,
        device="cpu",
        dtype="float32",
        max_lora_rank=8,
        max_loras=1,
        max_cpu_loras=1,
        log_dir=str(home / "logs"),
        startup_s=300.0,
        replicas=replicas,
        engine=VllmProcess(),
    )


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk-mb", type=int, default=32)
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="weight-sync-", dir="/dev/shm"))  # where versions lie
    ray.init(include_dashboard=False, num_cpus=64, object_store_memory=256 * MiB, log_to_driver=False)
    try:
        if arguments.model is None:
            make_model(home / "model", hidden=384, layers=14, vocab=2048)
        summary = asyncio.run(run(arguments, home))
    finally:
        ray.shutdown()
        shutil.rmtree(home, ignore_errors=True)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
