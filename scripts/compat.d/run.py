#!/usr/bin/env python3
"""Whether every SDK version works against this server.

usage: scripts/compat [--base-url URL] [--base-model NAME] [--venvs DIR] [--log DIR] [VERSION ...]

Makes a venv per SDK version (kept in DIR), starts a server unless one is named, lets each version run the
same small script (scripts/compat.d/script.py), and prints a table of steps and versions. The last line is one
JSON object: per version how many steps are ok, which are not in that version, and which failed. Exit code 1
when one failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from serving import served
from venvs import VERSIONS, interpreter

HERE = Path(__file__).parent
PATIENCE_S = 1200
SIGNS = {"ok": "ok", "absent": "-", "failed": "FAILED"}


@dataclass
class Report:
    """`states` and `reasons` by step."""

    version: str
    states: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, step: str, state: str, why: str) -> None:
        self.states[step] = state
        self.reasons[step] = why

    @property
    def failed(self) -> dict[str, str]:
        return {step: self.reasons[step] for step in self.those("failed")}

    def those(self, state: str) -> list[str]:
        return [step for step, found in self.states.items() if found == state]


def tried(version: str, url: str, model: str, venvs: Path, log: Path) -> Report:
    report = Report(version)
    try:
        python = interpreter(version, venvs)
    except subprocess.CalledProcessError as error:
        report.add("install", "failed", f"pip ended with {error.returncode}")
        return report
    start = time.monotonic()
    with (log / f"{version}.log").open("w") as stderr:
        _run(python, url, model, stderr.fileno(), report)
    report.seconds = time.monotonic() - start
    return report


def _run(python: Path, url: str, model: str, stderr: int, report: Report) -> None:
    script = subprocess.Popen(
        [python, str(HERE / "script.py"), url, model],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=_environment(),
    )
    try:
        lines, _ = script.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        script.kill()
        lines, _ = script.communicate()
    for line in lines.splitlines():
        report.add(**json.loads(line))
    if script.returncode:
        report.add("end", "failed", f"ended with {script.returncode} after {PATIENCE_S} s at most")


def _environment() -> dict[str, str]:
    mine = {"HF_HUB_OFFLINE": "1", "TINKER_PROJECT_ID": "compat"}
    return {"TINKER_API_KEY": "tml-compat", **os.environ, **mine}


def show(reports: list[Report]) -> None:
    steps = dict.fromkeys(step for report in reports for step in report.states)
    _row("", [report.version for report in reports])
    for step in steps:
        _row(step, [SIGNS[report.states[step]] if step in report.states else "?" for report in reports])
    _row("seconds", [f"{report.seconds:.0f}" for report in reports])
    for report in reports:
        for step, why in report.failed.items():
            print(f"{report.version} {step}: {why}")


def _row(name: str, cells: list[str]) -> None:
    print(f"{name:24}" + "".join(f"{cell:>8}" for cell in cells))


def summary(report: Report) -> dict[str, object]:
    return {"ok": len(report.those("ok")), "absent": report.those("absent"), "failed": report.failed}


def main() -> int:
    parser = argparse.ArgumentParser(
        "scripts/compat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--base-url", default="")
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--venvs", type=Path, default=HERE.parents[1] / ".venv-compat")
    parser.add_argument(
        "--log", type=Path, help="what each version wrote to stderr (default: the venvs' directory)"
    )
    arguments = parser.parse_args()
    log: Path = arguments.log or arguments.venvs
    for directory in (arguments.venvs, log):
        directory.mkdir(parents=True, exist_ok=True)
    with nullcontext((arguments.base_url, 0)) if arguments.base_url else served() as (url, _):
        reports = [
            tried(version, url, arguments.base_model, arguments.venvs, log)
            for version in arguments.versions or VERSIONS
        ]
    show(reports)
    print(json.dumps({report.version: summary(report) for report in reports}))
    return 1 if any(report.failed for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
