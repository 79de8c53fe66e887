#!/usr/bin/env python3
"""Latency of two checkouts beside each other, asked in turns: the pace of the machine cancels out.

usage: scripts/bench/turns.py OLD_CHECKOUT [NEW_CHECKOUT] [--repeats N]

Each checkout serves from its own .venv (scripts/setup); the new one is this one by default. Both servers run
at once; each request goes to one, then to the other, first to either alternately.

Prints a table and, as its last line, one JSON object: by request the medians of both in milliseconds, and the
median of the ratios new / old of each turn.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import tinker
from client import random_datum, random_prompt
from serving import options_of, served
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-4)
SAMPLING = types.SamplingParams(max_tokens=8, stop=[])
DATA = [random_datum(64) for _ in range(8)]
QUESTION = random_prompt(16)


def requests(url: str) -> dict[str, Callable[[], object]]:
    service = tinker.ServiceClient(base_url=url)
    training = service.create_lora_training_client(base_model="tiny", rank=32).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    return {
        "forward_backward": lambda: training.forward_backward(DATA, "cross_entropy").result(),
        "optim_step": lambda: training.optim_step(ADAM).result(),
        "sample": lambda: sampler.sample(QUESTION, 1, SAMPLING).result(),
        "save": lambda: training.save_weights_and_get_sampling_client().result(),
    }


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    parser = options_of(__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).resolve().parents[2])
    parser.add_argument("--repeats", type=int, default=150)
    arguments = parser.parse_args()
    report = {}
    with served(checkout=arguments.old) as (old_url, _), served(checkout=arguments.new) as (new_url, _):
        old, new = requests(old_url), requests(new_url)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in old}
        for number in range(arguments.repeats + 5):
            for name in old:
                if number % 2:
                    after = timed(new[name])
                    before = timed(old[name])
                else:
                    before = timed(old[name])
                    after = timed(new[name])
                if number >= 5:
                    times[name].append((before, after))
    print(f"{'':20}{'old ms':>10}{'new ms':>10}{'new/old':>10}")
    for name, pairs in times.items():
        before, after = (statistics.median(values) for values in zip(*pairs, strict=True))
        ratio = statistics.median(new / old for old, new in pairs)
        print(f"{name:20}{before:10.2f}{after:10.2f}{ratio:10.3f}")
        report[name] = {"old_ms": round(before, 2), "new_ms": round(after, 2), "ratio": round(ratio, 3)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
