#!/usr/bin/env python3
"""CPU time, wall time and memory of a complete start of `skyrl-tinker serve` on the tiny model.

usage: scripts/bench/start.py [--starts N] [--against CHECKOUT]

Each start has a home of its own, and ends before the next begins. CHECKOUT is started in turns with this one,
by the same Python. On a busy machine compare CPU seconds: wall time says little there.

Ends by itself, with the default arguments within five minutes. Prints a table and, as its last line, one JSON
object, of medians by checkout: ready_s: wall time until ready; cpu_s: of all processes until then; ray_cpu_s
and ray_mb: of Ray's own processes (MB that no other process has); first_s: wall time until there is a process
of each kind; cpu_by_kind_s.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from tests.support.serve import KINDS as SERVED

OWN = Path(__file__).resolve().parents[2]
POLL_S = 0.1
KINDS = {  # part of the title
    **{part: f"Ray: {kind}" if kind in ("raylet", "GCS") else kind for kind, part in SERVED.items()},
    "raylet_ended": "Ray: agents",
    "ray::DashboardAgent": "Ray: agents",
    "ray::RuntimeEnvAgent": "Ray: agents",
    "dashboard/agent.py": "Ray: agents",
    "runtime_env/agent/main.py": "Ray: agents",
    "dashboard/dashboard.py": "Ray: dashboard",
    "_private/monitor.py": "Ray: autoscaler",
    "log_monitor.py": "Ray: log monitor",
    "ray::SamplerServer": "actor of vLLM",
    "ray::IDLE": "worker",
    "default_worker.py": "worker",
    "VLLM::EngineCore": "vLLM core",
    "sglang::scheduler": "SGLang scheduler",
    "sglang::detokenizer": "SGLang detokenizer",
    "sglang_entry.py": "SGLang API",
    "skyrl_tinker serve": "serve",
}


@dataclass
class Start:
    ready_s: float = 0.0
    first_s: dict[str, float] = field(default_factory=dict)
    cpu_by_kind_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ray_mb: float = 0.0

    @property
    def cpu_s(self) -> float:
        return sum(self.cpu_by_kind_s.values())

    @property
    def ray_cpu_s(self) -> float:
        return sum(spent for kind, spent in self.cpu_by_kind_s.items() if kind.startswith("Ray: "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="of each checkout")
    parser.add_argument("--against", type=Path, help="another checkout")
    arguments = parser.parse_args()
    checkouts = [OWN] if arguments.against is None else [arguments.against.resolve(), OWN]
    starts: dict[Path, list[Start]] = {checkout: [] for checkout in checkouts}
    print(f"{'checkout':40} ready_s   cpu_s ray_cpu_s  ray_mb    load", flush=True)
    for _ in range(arguments.starts):
        for checkout in checkouts:
            found = measured(checkout)
            starts[checkout].append(found)
            row = f"{found.ready_s:7.1f} {found.cpu_s:7.1f} {found.ray_cpu_s:9.1f} {found.ray_mb:7.0f}"
            print(f"{checkout!s:40} {row} {os.getloadavg()[0]:7.1f}", flush=True)
    medians = {str(checkout): summary(found) for checkout, found in starts.items()}
    for kind in sorted({kind for each in medians.values() for kind in each["cpu_by_kind_s"]}):
        print(f"{kind:20}", *(f"{each['cpu_by_kind_s'].get(kind, 0.0):7.1f} s" for each in medians.values()))
    print(json.dumps(medians))


def summary(starts: list[Start]) -> dict[str, Any]:
    figures = ("ready_s", "cpu_s", "ray_cpu_s", "ray_mb")
    tables = ("first_s", "cpu_by_kind_s")
    return {name: median([getattr(start, name) for start in starts]) for name in figures} | {
        name: {
            kind: median([getattr(start, name).get(kind, 0.0) for start in starts])
            for kind in sorted({kind for start in starts for kind in getattr(start, name)})
        }
        for name in tables
    }


def median(values: list[float]) -> float:
    return round(statistics.median(values), 1)


def measured(checkout: Path) -> Start:
    with tempfile.TemporaryDirectory(prefix="skyrl-start-") as home:
        command = [sys.executable, "-m", "skyrl_tinker", "serve", "--home", home, "--port", "0"]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        began_at = time.monotonic()
        server = Popen(command, stdout=PIPE, text=True, cwd=checkout, env=environment)
        assert server.stdout is not None
        reader = Thread(target=server.stdout.readline)
        reader.start()
        start = Start()
        try:
            while reader.is_alive():
                note(start, server.pid, time.monotonic() - began_at)
                reader.join(POLL_S)
            start.ready_s = time.monotonic() - began_at
            if server.poll() is not None:
                sys.exit(f"serve ended with {server.returncode}")
            take(start, server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    return start


def note(start: Start, pid: int, now_s: float) -> None:
    for process in tree(pid):
        start.first_s.setdefault(kind_of(process), now_s)


def take(start: Start, pid: int) -> None:
    """Read what each process has taken, with those of its children that have ended."""
    for process in tree(pid):
        kind, spent = kind_of(process), process.cpu_times()
        start.cpu_by_kind_s[kind] += sum(spent[:4])
        if kind.startswith("Ray: "):
            start.ray_mb += process.memory_full_info().uss / 1e6


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def kind_of(process: psutil.Process) -> str:
    try:
        title = " ".join((process.name(), *process.cmdline()))
    except psutil.NoSuchProcess:
        return "ended"
    return next((kind for part, kind in KINDS.items() if part in title), process.name())


if __name__ == "__main__":
    main()
