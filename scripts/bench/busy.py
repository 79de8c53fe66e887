#!/usr/bin/env python3
"""Does sampling stall training? The trainer's busy fraction with and without a flood of samples.

usage: scripts/bench/busy.py [--base-url URL] [--base-model NAME] [--seconds N] [--flood N]

Tenants keep work queued for the trainer all the time, so busy / (busy + waiting), as /metrics counts it, is 1
unless something stalls the trainer between units. On a machine with few cores the flood also takes CPU time
from the trainer, which makes its units slower (`unit_ms`) but does not stall it.
Prints a table and, as its last line, one JSON object.
"""

import json
import threading
import time
import urllib.request
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import tinker
from client import options, random_datum, random_prompt
from serving import served
from tinker import types

TENANTS, DATUMS, TOKENS, AHEAD = 2, 8, 64, 3
ADAM = types.AdamParams(learning_rate=1e-4)


def train(training: tinker.TrainingClient, stop: threading.Event) -> None:
    """With AHEAD steps always submitted, until `stop`."""
    data = [random_datum(TOKENS) for _ in range(DATUMS)]
    submitted: deque[tuple[tinker.APIFuture[Any], ...]] = deque()
    while not stop.is_set():
        submitted.append((training.forward_backward(data, "cross_entropy"), training.optim_step(ADAM)))
        if len(submitted) > AHEAD:
            for future in submitted.popleft():
                future.result()
    for pair in submitted:
        for future in pair:
            future.result()


@contextmanager
def flood(sampler: tinker.SamplingClient, size: int) -> Iterator[list[int]]:
    """`size` samples of 64 tokens always in flight; yields a list that gets an entry per finished one."""
    stop, done = threading.Event(), []

    def keep() -> None:
        params = types.SamplingParams(max_tokens=64, stop=[])
        while not stop.is_set():
            sampler.sample(random_prompt(16), 1, params).result()
            done.append(1)

    with threads(keep for _ in range(size)):
        yield done
        stop.set()


@contextmanager
def threads(works: Iterator[Callable[[], None]]) -> Iterator[None]:
    started = [threading.Thread(target=work) for work in works]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        for thread in started:
            thread.join()


def counters(url: str) -> dict[str, float]:
    """Return the sums over labels, by name."""
    sums: defaultdict[str, float] = defaultdict(float)
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    for line in lines:
        if line and not line.startswith("#"):
            sums[line.split("{")[0].split()[0]] += float(line.split()[-1])
    return sums


def measure(url: str, seconds: float) -> dict[str, float]:
    before = counters(url)
    time.sleep(seconds)
    after = counters(url)
    busy, waiting, units = (
        after[name] - before[name]
        for name in (
            "skyrl_tinker_trainer_busy_seconds_total",
            "skyrl_tinker_trainer_waiting_seconds_total",
            "skyrl_tinker_unit_requests_count",
        )
    )
    return {"busy": round(busy / (busy + waiting), 4), "unit_ms": round(1000 * busy / units, 1)}


def run(url: str, base_model: str, seconds: float, size: int) -> dict[str, float]:
    summary: dict[str, float] = {}
    stop = threading.Event()
    with tinker.ServiceClient(base_url=url) as service:
        sampler = service.create_sampling_client(base_model=base_model).result()
        clients = [
            service.create_lora_training_client(base_model=base_model, rank=32).result()
            for _ in range(TENANTS)
        ]
        with threads(partial(train, client, stop) for client in clients):
            time.sleep(1)
            print(f"{'':10}{'busy':>8}{'unit ms':>9}{'samples/s':>11}")
            for name, load in (("alone", nullcontext([])), ("flooded", flood(sampler, size))):
                with load as done:
                    figures = measure(url, seconds)
                    rate = len(done) / seconds
                print(f"{name:10}{figures['busy']:8.3f}{figures['unit_ms']:9.1f}{rate:11.1f}")
                summary |= {f"{key}_{name}": value for key, value in figures.items()}
                summary[f"samples_per_s_{name}"] = round(rate, 1)
            stop.set()
    return summary


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--flood", type=int, default=64, help="samples in flight")
    arguments = parser.parse_args()
    server = nullcontext((arguments.base_url, 0)) if arguments.base_url else served()
    with server as (url, _):
        summary = run(url, arguments.base_model, arguments.seconds, arguments.flood)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
