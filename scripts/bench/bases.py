#!/usr/bin/env python3
"""A second base model beside a first: same bits, memory, and the first while the second's processes die.

usage: scripts/bench/bases.py [--steps N] [--turns N]

Servers of tiny models, one after another: each base model alone, the first beside a second that is only
sampled, both trained, and the second on demand. Two models of each base model train, all at once where there
are two, and their losses are compared. Then, in turns, a model of the first trains and samples for as long as
the second needs to come back: undisturbed, with the second's rank killed, and with the core of its sampler
killed. On demand the second is started and stopped in turns, by the route of `skyrl-tinker bases` and
by a request, beside such a first.

Ends by itself, with the default arguments within ten minutes. Prints, as its last line, one JSON object:
bit_equal: losses beside another base model are those of a server of its own; ready_s and pss_mb: of each
server, when it was ready and idle (MB of PSS); step_ms and sample_ms of the first base model (p50) while
nothing is killed, the rank, the core; errors of its requests; back_s: from the kill until the second answers
(p50); same: its logprobs are those of before. Of the one on demand: start_s and stop_s, from the order until
it is ready, or has no process left; freed: share of its memory that is back then; asked_s: from a request
that finds it stopped until the answer; starting_ms: steps of the first alone, and while the second starts.
"""

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx
import psutil
import tinker
from serving import options_of
from tinker import types

from tests.e2e.support.client import Client, datum, logprobs_of, prompt, random_tokens, train
from tests.support.processes import below, command, vllm_servers
from tests.support.serve import Serve, serving
from tests.support.tiny_models import write_tiny
from tests.support.waiting import wait_until

SEEDS, DATUMS, TOKENS = (1, 2), 3, 50
PROBE = random_tokens(40, seed=4)
SAMPLING = types.SamplingParams(max_tokens=8, stop=[])
KILLS = ("nothing", "rank", "core")


@contextmanager
def started(home: Path, figures: dict[str, Any], name: str, *bases: str) -> Iterator[tuple[Serve, Client]]:
    """Server of base models, with its start and memory in `figures`; the client is of the first."""
    first, *further = bases
    also = [word for each in further for word in ("--also", each)]
    began = time.monotonic()
    with serving(home / name, "--base-model", first, "--context-length", "64", *also) as server:
        figures["ready_s"][name] = round(time.monotonic() - began, 1)
        figures["pss_mb"][name] = round(pss(server) / 1e6)
        with tinker.ServiceClient(base_url=server.url) as service:
            yield server, Client(server.url, service, first)


def pss(server: Serve) -> int:
    found = 0
    for each in server.tree():
        with suppress(psutil.NoSuchProcess):  # it ended since the tree was read
            found += int(each.memory_full_info().pss)
    return found


def curves(service: tinker.ServiceClient, models: Sequence[str], steps: int) -> list[list[float]]:
    """Losses by model and step, of SEEDS models of each base model that train at once."""
    training = [Client("", service, model).new_lora(seed=seed) for model in models for seed in SEEDS]
    losses: list[list[float]] = [[] for _ in training]
    for step in range(steps):
        batch = [datum(random_tokens(TOKENS, seed=10 * step + each)) for each in range(DATUMS)]
        passes = [model.forward_backward(batch, "cross_entropy") for model in training]
        done = [model.optim_step(types.AdamParams(learning_rate=1e-2)) for model in training]
        for each, found in zip(passes, losses, strict=True):
            found.append(each.result().metrics["loss:sum"])
        for step_done in done:
            step_done.result()
    return losses


class First(threading.Thread):
    """Steps and samples of the first base model, one after another, until `stop`."""

    def __init__(self, training: tinker.TrainingClient, sampler: tinker.SamplingClient) -> None:
        super().__init__()
        self.stop = threading.Event()
        self.errors: list[str] = []
        self.step_ms: list[float] = []
        self.sample_ms: list[float] = []
        self._works = (
            (self.step_ms, partial(train, training, PROBE, 1e-4)),
            (self.sample_ms, lambda: sampler.sample(prompt(PROBE), 1, SAMPLING).result()),
        )

    def run(self) -> None:
        while not self.stop.is_set():
            for times, work in self._works:
                began = time.monotonic()
                try:
                    work()
                except Exception as error:  # counted: none is expected
                    self.errors.append(f"{type(error).__name__}: {error}")
                times.append(1000 * (time.monotonic() - began))


@contextmanager
def busy(training: tinker.TrainingClient, sampler: tinker.SamplingClient) -> Iterator[First]:
    worker = First(training, sampler)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop.set()
        worker.join()


def rank_of(server: Serve, second: str) -> Callable[[], psutil.Process]:
    """Return a finder of the second base model's rank, by a kill of one of the two."""
    ranks = server.find_all("trainer")
    ranks[0].kill()

    def lost() -> list[str]:
        problems = httpx.get(f"{server.url}/api/v1/console/now", timeout=30).json()["problems"]
        return [each["subject"] for each in problems if "the trainer was lost" in each["text"]]

    wait_until(lambda: bool(lost()) and len(server.find_all("trainer")) == 2)
    fresh = next(each for each in server.find_all("trainer") if each not in ranks)
    known = ranks[1] if second in lost()[0] else fresh  # that of the first, which nobody kills
    return lambda: next(each for each in server.find_all("trainer") if each != known)


def core_of(second: str) -> psutil.Process:
    found = next(each for each in vllm_servers(psutil.Process().pid) if second in command(each))
    return next(each for each in below(found.pid) if "resource_tracker" not in " ".join(command(each)))


def disturbed(server: Serve, clients: Sequence[Client], turns: int) -> dict[str, Any]:
    first, second = (client.new_lora() for client in clients)
    for each in (first, second):
        train(each, PROBE)
    samplers = [client.base_sampler() for client in clients]
    expected = logprobs_of(second, PROBE).tolist()
    rank = rank_of(server, clients[1].model)
    same = logprobs_of(second, PROBE).tolist() == expected
    times: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    errors: list[str] = []
    window_s = 0.0
    for turn, kill in enumerate((*KILLS[1:], *(turns * KILLS)), 1 - len(KILLS)):
        with busy(first, samplers[0]) as worker:
            began = time.monotonic()
            if kill == "rank":
                rank().kill()
            elif kill == "core":
                core_of(clients[1].model).kill()
            else:
                time.sleep(window_s)
            same &= logprobs_of(second, PROBE).tolist() == expected
            samplers[1].sample(prompt(PROBE), 1, SAMPLING).result()
            back_s = time.monotonic() - began
        errors += worker.errors
        window_s = max(window_s, back_s)
        if turn < 0:  # only tells how long to look
            continue
        times[kill]["step_ms"] += worker.step_ms
        times[kill]["sample_ms"] += worker.sample_ms
        times[kill]["back_s"].append(back_s)
    medians = {
        what: {kill: round(statistics.median(found[what]), 1) for kill, found in times.items()}
        for what in ("step_ms", "sample_ms", "back_s")
    }
    return {**medians, "errors": errors, "same": same}


def change(server: Serve, base_model: str, action: str, state: str) -> float:
    """Start or stop a base model; return the seconds until it is in that state."""
    began, url = time.monotonic(), f"{server.url}/api/v1/console/admin/bases"
    httpx.post(url, json={"base_model": base_model, "action": action}, timeout=30).raise_for_status()

    def reached() -> bool:
        told = httpx.get(f"{server.url}/readyz", timeout=30).json()["base_models"]
        return any(each["base_model"] == base_model and each["state"] == state for each in told)

    wait_until(reached)
    return time.monotonic() - began


def on_demand(server: Serve, client: Client, second: str, turns: int) -> dict[str, Any]:
    first, sampler = client.new_lora(), client.base_sampler()
    stopped = Client("", client.service, second).base_sampler()
    train(first, PROBE)
    found: defaultdict[str, list[float]] = defaultdict(list)
    steps_ms: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(turns):
        before = pss(server)
        with busy(first, sampler) as worker:
            found["start_s"].append(change(server, second, "start", "ready"))
        steps_ms["beside_a_start"] += worker.step_ms
        with busy(first, sampler) as worker:
            time.sleep(found["start_s"][-1])
        steps_ms["alone"] += worker.step_ms
        train(Client("", client.service, second).new_lora(), PROBE)
        used = pss(server)
        found["stop_s"].append(change(server, second, "stop", "stopped"))
        found["freed"].append((used - pss(server)) / (used - before))
        with busy(first, sampler):
            began = time.monotonic()
            stopped.compute_logprobs(prompt(PROBE)).result()
            found["asked_s"].append(time.monotonic() - began)
        change(server, second, "stop", "stopped")
    medians = {what: round(statistics.median(each), 2) for what, each in found.items()}
    return {
        **medians,
        "starting_ms": {name: round(statistics.median(each), 1) for name, each in steps_ms.items()},
    }


def main() -> None:
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"ready_s": {}, "pss_mb": {}}
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        models = [str(home / name) for name in ("first", "second")]
        write_tiny(home / "first", vocab=512)
        write_tiny(home / "second", arch="llama", vocab=1024, seed=1)
        alone = []
        for model in models:
            with started(home, figures, f"{Path(model).name}_alone", model) as (_, client):
                alone += curves(client.service, [model], arguments.steps)
        with started(home, figures, "beside_sampled", models[0], models[1]):
            pass
        with started(home, figures, "both", models[0], f"{models[1]}:train,sample") as (server, client):
            figures["bit_equal"] = curves(client.service, models, arguments.steps) == alone
            clients = [Client("", client.service, model) for model in models]
            figures |= disturbed(server, clients, arguments.turns)
        second = f"{models[1]}:train,sample,on_demand"
        with started(home, figures, "on_demand", models[0], second) as (server, client):
            figures |= on_demand(server, client, models[1], arguments.turns)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
