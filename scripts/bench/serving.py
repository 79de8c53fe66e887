"""Parts of benchmarks: their options, a server of one's own in a temporary home, the judgement at the end."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

READY = "skyrl-tinker ready: "


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's options; SIGTERM now ends it as an error does, with its servers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def chosen(parser: argparse.ArgumentParser, given: str | None, known: Collection[str]) -> Sequence[str]:
    """Names of `--attacks`, separated by commas; all without it."""
    names = given.split(",") if given else tuple(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--attacks: found {', '.join(unknown)}, expected some of {', '.join(known)}")
    return names


def run_when_idle() -> None:
    """Have this process, which stands for another machine, run only where nothing else wants to."""
    for thread in Path("/proc/self/task").iterdir():
        # Those that they start inherit it.
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


def judged(result: Mapping[str, Any]) -> int:
    """Print the bars that were `missed`, and the result as the last line; returns the exit code."""
    for text in result["missed"]:
        print(f"missed: {text}")
    print(json.dumps(result))
    return 1 if result["missed"] else 0


@contextmanager
def served(*arguments: str, checkout: Path | None = None) -> Iterator[tuple[str, int]]:
    """URL and pid of `skyrl-tinker serve`, ready. `checkout`: with a .venv, served in place of ours."""
    programs = Path(sys.executable).parent if checkout is None else checkout.absolute() / ".venv" / "bin"
    with tempfile.TemporaryDirectory() as home:
        command = [str(programs / "skyrl-tinker"), "serve", "--home", home, "--port", "0"]
        server = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True, cwd=checkout)
        assert server.stdout is not None
        try:
            line = next((line for line in server.stdout if line.startswith(READY)), None)
            if line is None:
                raise SystemExit(f"serve ended with {server.wait()}")
            yield line.removeprefix(READY).strip(), server.pid
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
