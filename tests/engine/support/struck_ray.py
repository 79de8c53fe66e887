"""Ray, started in a process of its own while its daemons get signals.

`python -m tests.engine.support.struck_ray KIND SIGNAL WAITS TIMES [SETTINGS_JSON]`: the first TIMES processes
of KIND get SIGNAL as soon as they are there; WAITS is JSON. Prints the command lines of Ray's processes; with
settings it is an engine.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import services

from skyrl_tinker.engine import engine_process, local_ray


def strike(kind: str, signum: int, times: int) -> None:
    start = services.start_ray_process
    struck: list[int] = []

    def start_and_strike(command: list[str], process_type: str, *rest: Any, **options: Any) -> Any:
        info = start(command, process_type, *rest, **options)
        if process_type == kind and len(struck) < times:
            struck.append(info.process.pid)
            os.kill(info.process.pid, signum)
        return info

    services.start_ray_process = start_and_strike


def main(kind: str, signal_name: str, waits: str, times: str, settings_file: str | None = None) -> None:
    strike(kind, signal.Signals[signal_name], int(times))
    local_ray.WAITS_S = tuple(json.loads(waits))
    if settings_file is not None:
        sys.exit(engine_process.run(Path(settings_file)))
    with tempfile.TemporaryDirectory(prefix="ray") as directory:
        local_ray.start(1, Path(directory))
        print(json.dumps([" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)]))
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
