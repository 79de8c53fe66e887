#!/usr/bin/env python3
"""What users notice of others' large requests, of a slow database or storage, and of their own typing error.

usage: scripts/bench/bystanders.py [MEASURE...]

    typo      the next call after one that the SDK could not build: save_state(user_metadata={"step": 5})
    adapters  a sample of 3 tokens of one adapter, the longest of ten, beside three streams of another
              where a batch has one (max_loras 1)
    listed    such a sample of the base model, the longest, beside another session's 30 prompts of 4,000
              tokens with topk_prompt_logprobs 64, and beside its sample of 64 sequences of 160 tokens with
              topk_sample_logprobs 100
    flood     such a sample of the base model beside another session's 64 sequences of 3,000 tokens: p50, p99
    passes    such a sample, and passes of 64 tokens, beside two sessions with queues of passes of 100,000
              tokens: the longest ones, that pass also as a part of its bar: 1.5 x alone, and one large pass
    storage   passes of one session while another's checkpoint is loaded from storage that takes 4 s for each
              file: their median, as a multiple of that before
    database  the longest wait for /healthz while those processes of PostgreSQL that serve connections are
              stopped for 6 s, and that in the 6 s before

Without names all of them. Each starts what it needs, on the tiny model, and ends by itself. Prints a line for
each and, as its last line, one JSON object; exits with 1 when a bar was missed.
"""

import http.client
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import Any

os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ.setdefault("TINKER_TELEMETRY", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx
import tinker
from client import random_datum, random_prompt
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from serving import options_of, run_when_idle
from tinker import types

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from tests.support.object_storage import BUCKET, object_storage
from tests.support.postgres import Postgres, postgres_server
from tests.support.serve import Serve, serving

BARS = {
    "next_call_s": 5.0,
    "sample_p99_s": 2.0,
    "listed_of_prompts_s": 2.0,
    "listed_of_samples_s": 2.0,
    "adapter_longest_s": 3.0,
    "sample_longest_s": 2.0,
    "pass_to_bar": 1.0,
    "pass_ratio": 1.2,
    "loop_still_ms": 50.0,
}
SMALL = types.SamplingParams(max_tokens=3, stop=[])
LARGE = types.SamplingParams(max_tokens=3000, stop=[])
WIDE = types.SamplingParams(max_tokens=160, stop=[])
LISTED: dict[str, Callable[[tinker.SamplingClient], list[Any]]] = {
    "of_prompts": lambda client: [
        client.sample(random_prompt(4000), 1, SMALL, include_prompt_logprobs=True, topk_prompt_logprobs=64)
        for _ in range(30)
    ],
    "of_samples": lambda client: [client.sample(random_prompt(3), 64, WIDE, topk_sample_logprobs=100)],
}
"""Large requests of another session, by name."""
FLOOD_S, STILL_S, SLOW_S, BEFORE_S, LIMIT_S = 40.0, 6.0, 4.0, 8.0, 180.0
POLL_S = 0.005

Report = dict[str, float]


@dataclass(frozen=True)
class Place:
    """Server with what it stands on."""

    server: Serve
    postgres: Postgres | None = None

    def service(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.server.url)

    def training(self) -> tinker.TrainingClient:
        """Make a model in a session of its own."""
        pending = self.service().create_lora_training_client(base_model="tiny", rank=8)
        return pending.result(LIMIT_S)

    def adapter(self) -> tinker.SamplingClient:
        return self.training().save_weights_and_get_sampling_client().result(LIMIT_S)

    def base_sampler(self) -> tinker.SamplingClient:
        return self.service().create_sampling_client(base_model="tiny").result(LIMIT_S)


# Servers


@contextmanager
def with_one_adapter_at_a_time(home: Path) -> Iterator[Place]:
    config = home.with_name("settings.toml")
    config.write_text("max_loras = 1\n")
    with serving(home, "--config", str(config)) as server:
        yield Place(server)


@contextmanager
def on_object_storage(home: Path) -> Iterator[Place]:
    with object_storage(), serving(home, "--checkpoints", f"s3://{BUCKET}/run") as server:
        yield Place(server)


@contextmanager
def on_postgresql(home: Path) -> Iterator[Place]:
    with postgres_server() as postgres, serving(home, "--database-url", postgres.new_database()) as server:
        yield Place(server, postgres)


# Measures


def typo(place: Place) -> Report:
    training = place.training()
    train(training)
    with suppress(ValueError):  # pydantic's is one
        training.save_state("typo", user_metadata={"step": 5}).result(LIMIT_S)  # type: ignore[dict-item]
    return {"next_call_s": seconds(lambda: training.save_state("mended").result(LIMIT_S))}


def flood(place: Place) -> Report:
    large, small = (place.base_sampler() for _ in range(2))
    sample(small)
    running = Thread(target=lambda: large.sample(random_prompt(3), 64, LARGE).result(), daemon=True)
    running.start()
    taken = [seconds(lambda: sample(small)) for _ in during(FLOOD_S)]
    assert running.is_alive(), "the large request ended before the small ones were measured"
    return {"samples": len(taken), "sample_p50_s": part(taken, 0.5), "sample_p99_s": part(taken, 0.99)}


def listed(place: Place) -> Report:
    small = place.base_sampler()
    sample(small)
    report: Report = {}
    for name in LISTED:
        # Another process: the SDK, too, decodes long lists of logprobs for seconds.
        with ProcessPoolExecutor(1, get_context("spawn"), run_when_idle) as others:
            running = others.submit(list_logprobs, place.server.url, name)
            taken = [seconds(lambda: sample(small)) for _ in iter(running.done, True)]
        report |= {f"{name}_took_s": running.result(), f"listed_{name}_s": max(taken)}
    return report


def list_logprobs(url: str, name: str) -> float:
    client = tinker.ServiceClient(base_url=url).create_sampling_client(base_model="tiny").result(LIMIT_S)
    return seconds(lambda: [each.result(LIMIT_S) for each in LISTED[name](client)])


def adapters(place: Place) -> Report:
    busy, other = (place.adapter() for _ in range(2))
    sample(other)
    ended = Event()

    def stream() -> None:
        while not ended.is_set():
            busy.sample(random_prompt(3), 1, LARGE).result(LIMIT_S)

    with ThreadPoolExecutor(3) as streams:
        running = [streams.submit(stream) for _ in range(3)]
        time.sleep(BEFORE_S)
        taken = [seconds(lambda: sample(other)) for _ in range(10)]
        assert not any(each.done() for each in running), "a stream has failed"
        ended.set()
    return {"adapter_longest_s": max(taken)}


def passes(place: Place) -> Report:
    large, small, sampler = [place.training() for _ in range(2)], place.training(), place.base_sampler()
    data = [random_datum(500) for _ in range(200)]
    sample(sampler)
    train(small)
    alone = [seconds(lambda: train(small)) for _ in during(BEFORE_S)]
    units = [seconds(lambda: train(large[0], data)) for _ in range(3)]
    unit, window = max(units), 2 * min(units)
    queued = [each.forward_backward(data, "cross_entropy") for _ in range(2) for each in large]
    running = Thread(target=lambda: [each.result(LIMIT_S) for each in queued], daemon=True)
    running.start()
    with ThreadPoolExecutor(1) as samples:
        sampling = samples.submit(lambda: [seconds(lambda: sample(sampler)) for _ in during(window)])
        beside = [seconds(lambda: train(small)) for _ in during(window)]
        sampled = sampling.result()
    assert running.is_alive(), "the large passes ended before the small ones were measured"
    running.join()
    return {
        "unit_s": unit,
        "pass_longest_s": max(beside),
        "pass_to_bar": max(beside) / (1.5 * max(alone) + unit),
        "sample_longest_s": max(sampled),
    }


def storage(place: Place) -> Report:
    saves, passes = place.training(), place.training()
    train(saves)
    path = saves.save_state("stored").result(LIMIT_S).path
    train(passes)
    alone = [seconds(lambda: train(passes)) for _ in during(BEFORE_S)]
    shutil.rmtree(Directories(Settings(home=place.server.home)).checkpoint_root)  # a cache of what is stored
    beside = []
    with slow_objects():
        load = place.service().create_training_client_from_state
        loading = Thread(target=lambda: load(path).result(LIMIT_S))
        began = time.perf_counter()
        loading.start()
        while loading.is_alive():
            beside.append(seconds(lambda: train(passes)))
    took = time.perf_counter() - began
    assert took > SLOW_S, "the checkpoint was not fetched"
    return {"load_s": took, "pass_ratio": statistics.median(beside) / statistics.median(alone)}


def database(place: Place) -> Report:
    assert place.postgres is not None
    ended = Event()
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(ask, place, ended) for _ in range(4)]
        time.sleep(1.0)
        before = longest_wait(place, STILL_S)
        with place.postgres.backends_stopped():
            still = longest_wait(place, STILL_S)
        ended.set()
    answers = sum(each.result() for each in asked)
    assert answers, "nobody asked the database"
    return {"loop_before_ms": 1000 * before, "loop_still_ms": 1000 * still}


MEASURES: dict[str, tuple[Callable[[Path], Any], Callable[[Place], Report]]] = {
    "typo": (with_one_adapter_at_a_time, typo),
    "adapters": (with_one_adapter_at_a_time, adapters),
    "listed": (with_one_adapter_at_a_time, listed),
    "passes": (with_one_adapter_at_a_time, passes),
    "flood": (with_one_adapter_at_a_time, flood),  # the last there: it runs on
    "storage": (on_object_storage, storage),
    "database": (on_postgresql, database),
}


# What they have in common


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def during(within_s: float) -> Iterator[None]:
    """Yield until the time is over."""
    end = time.perf_counter() + within_s
    while time.perf_counter() < end:
        yield


def rounded(report: Report) -> dict[str, Any]:
    return {key: round(value, 3) for key, value in report.items()}


def part(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def sample(client: tinker.SamplingClient) -> None:
    client.sample(random_prompt(3), 1, SMALL).result(LIMIT_S)


def train(client: tinker.TrainingClient, data: list[types.Datum] | None = None) -> None:
    client.forward_backward(data or [random_datum(64)], "cross_entropy").result(LIMIT_S)


@contextmanager
def slow_objects() -> Iterator[None]:
    """Let the storage take SLOW_S for each object that is read."""
    served: Any = DomainDispatcherApplication  # each request is a call of it
    answer = served.__call__

    def late(app: Any, environment: dict[str, Any], start: Any) -> Any:
        if environment["REQUEST_METHOD"] == "GET":
            time.sleep(SLOW_S)
        return answer(app, environment, start)

    served.__call__ = late
    try:
        yield
    finally:
        served.__call__ = answer


def ask(place: Place, ended: Event) -> int:
    """Have the API read and write, again and again; returns how often it answered."""
    answers = 0
    with httpx.Client(base_url=f"{place.server.url}/api/v1", timeout=LIMIT_S) as http:
        http.headers["X-API-Key"] = os.environ["TINKER_API_KEY"]
        session = http.post("/create_session", json={"sdk_version": "0.38.0"}).json()["session_id"]
        while not ended.is_set():
            http.post("/session_heartbeat", json={"session_id": session})
            http.get("/training_runs", params={"limit": 10})
            answers += 2
    return answers


def longest_wait(place: Place, within_s: float) -> float:
    """Ask /healthz, for which only the event loop is needed; returns the longest wait in seconds."""
    connection = http.client.HTTPConnection(place.server.url.removeprefix("http://"), timeout=LIMIT_S)

    def healthz() -> None:
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()

    healthz()
    taken = []
    for _ in during(within_s):
        taken.append(seconds(healthz))
        time.sleep(POLL_S)
    connection.close()
    return max(taken)


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=", ".join(MEASURES))
    names = parser.parse_args().measures or list(MEASURES)
    if unknown := [name for name in names if name not in MEASURES]:
        parser.error(f"found {unknown[0]}, expected some of {', '.join(MEASURES)}")
    logging.disable(logging.WARNING)  # requests to the storage, and clients whose server has ended
    report: Report = {}
    for make in dict.fromkeys(MEASURES[name][0] for name in MEASURES if name in names):
        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory) / "home"
            with make(home) as place:
                for name, (needed, measure) in MEASURES.items():
                    if name in names and needed is make:
                        found = measure(place)
                        print(
                            f"{name:10}", *(f"{key} {value:.3f}" for key, value in found.items()), flush=True
                        )
                        report |= found
            Directories(Settings(home=home)).delete_outside_home()
    missed = [key for key, most in BARS.items() if report.get(key, 0.0) > most]
    for key in missed:
        print(f"missed: {key}: found {report[key]:.3f}, expected at most {BARS[key]}")
    print(json.dumps(rounded(report) | {"missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
