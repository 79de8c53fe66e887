#!/usr/bin/env python3
"""Seconds until a standby answers in place of a server that was killed with all its processes.

usage: scripts/bench/takeover.py [--takeovers N]

Each server has a home of its own; they share a PostgreSQL and an object storage (moto), both started here.
A client trains and samples through an API process with a third home. The server is killed with SIGKILL while
the next one stands by; then the client sends the next round of training, and samples of named and of unnamed
weights. The clock runs from the kill to the last answer, which must be to the bit what a quiet run gives.

Ends by itself, with the default arguments within five minutes. Prints a table and, as its last line, one JSON
object: takeover_s: each; takeover_max_s; base_model.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from tests.faults.test_standby import Servers, training
from tests.support.postgres import programs
from tests.support.serve import Serve

MOST = 4
"""Rounds that a client of `training` has left."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--takeovers", type=int, default=3, choices=range(1, MOST + 1))
    arguments = parser.parse_args()
    if programs() is None:
        sys.exit("PostgreSQL is not installed: apt-get install postgresql")
    os.environ["TINKER_API_KEY"] = "tml-local"
    logging.getLogger("werkzeug").disabled = True  # moto's, a line for each request
    with tempfile.TemporaryDirectory(prefix="skyrl-takeover-") as root, ExitStack() as stack:
        found = takeovers(Path(root), stack, arguments.takeovers)
    print(json.dumps({"takeover_s": found, "takeover_max_s": max(found), "base_model": "tiny"}))


def takeovers(root: Path, stack: ExitStack, number: int) -> list[float]:
    servers = Servers(root, stack)
    working = servers.first.server
    go_on = stack.enter_context(training(servers.url))
    found = []
    print("takeover  seconds", flush=True)
    for each in range(1, number + 1):
        standby = servers.start(f"standby-{each}").server
        wait_until_it_stands_by(standby)
        killed_at = time.monotonic()
        kill(working)
        go_on()
        found.append(round(time.monotonic() - killed_at, 1))
        print(f"{each:8}  {found[-1]:7}", flush=True)
        working = standby.wait_ready()
    return found


def wait_until_it_stands_by(server: Serve) -> None:
    assert server.process.stderr is not None
    for line in server.process.stderr:
        if "waiting for its end" in line:
            return
    sys.exit(f"the standby ended with {server.process.wait()}")


def kill(server: Serve) -> None:
    for process in server.tree():
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main()
