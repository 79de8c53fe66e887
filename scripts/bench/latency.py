#!/usr/bin/env python3
"""Latency of every step of an RL loop against any Tinker server, through the real SDK.

usage: scripts/bench/latency.py [--base-url URL] [--base-model NAME] [--repeats N] [--pid PID]

Without a URL it starts a server of its own. --pid is the `serve` process of a running one: the memory (PSS)
of it and all its descendants is reported too.
Prints a table and, as its last line, one JSON object (milliseconds; memory in MB).
"""

import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import tinker
from client import options, random_datum, random_prompt
from serving import served
from tinker import types

TOKENS = 64
DATUMS = 8


def timed(repeats: int, work: Callable[[], object], warm_up: int = 3) -> list[float]:
    """Milliseconds of each repeat, after a few that do not count."""
    figures = []
    for number in range(warm_up + repeats):
        start = time.perf_counter()
        work()
        if number >= warm_up:
            figures.append(1000 * (time.perf_counter() - start))
    return figures


def samples_at_once(sampler: tinker.SamplingClient, count: int) -> None:
    params = types.SamplingParams(max_tokens=8, stop=[])
    for pending in [sampler.sample(random_prompt(16), 1, params) for _ in range(count)]:
        pending.result()


def measure(service: tinker.ServiceClient, base_model: str, repeats: int) -> dict[str, list[float]]:
    data = [random_datum(TOKENS) for _ in range(DATUMS)]
    adam = types.AdamParams(learning_rate=1e-4)

    def create() -> tinker.TrainingClient:
        return service.create_lora_training_client(base_model=base_model, rank=32).result()

    training = create()
    sampler = training.save_weights_and_get_sampling_client().result()

    def pipelined() -> None:
        backward, step = training.forward_backward(data, "cross_entropy"), training.optim_step(adam)
        backward.result()
        step.result()

    few = max(3, repeats // 6)
    return {
        "create_model": timed(few, create, warm_up=1),
        "forward_backward_8x64": timed(
            repeats, lambda: training.forward_backward(data, "cross_entropy").result()
        ),
        "optim_step": timed(repeats, lambda: training.optim_step(adam).result()),
        "forward_backward+optim_step": timed(repeats, pipelined),
        "sample_8_tokens": timed(repeats, lambda: samples_at_once(sampler, 1)),
        "ephemeral_save": timed(few, lambda: training.save_weights_and_get_sampling_client().result()),
        "sample_x64": timed(few, lambda: samples_at_once(sampler, 64), warm_up=1),
        "sample_x512": timed(3, lambda: samples_at_once(sampler, 512), warm_up=1),
    }


def memory_mb(pid: int) -> float:
    import psutil

    root = psutil.Process(pid)
    return sum(process.memory_full_info().pss for process in (root, *root.children(recursive=True))) / 2**20


def report(figures: dict[str, list[float]]) -> dict[str, float]:
    print(f"{'':30}{'p50 ms':>10}{'p95 ms':>10}")
    summary: dict[str, float] = {}
    for name, values in figures.items():
        p50, p95 = statistics.median(values), sorted(values)[int(0.95 * (len(values) - 1))]
        print(f"{name:30}{p50:10.1f}{p95:10.1f}")
        summary |= {f"{name}_p50_ms": round(p50, 2), f"{name}_p95_ms": round(p95, 2)}
    return summary


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--pid", type=int, default=0)
    arguments = parser.parse_args()
    running = (arguments.base_url, arguments.pid)
    with nullcontext(running) if arguments.base_url else served() as (url, pid):
        idle = {"idle_pss_mb": round(memory_mb(pid))} if pid else {}
        with tinker.ServiceClient(base_url=url) as service:
            summary = report(measure(service, arguments.base_model, arguments.repeats))
    print(json.dumps(summary | idle))


if __name__ == "__main__":
    main()
