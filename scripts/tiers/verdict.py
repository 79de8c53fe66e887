"""Which failures count: all of the deterministic tier; of servers those that fail once more, alone."""

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiers.jobs import ROOT, Job, pytest_job
from tiers.running import run

FLAKY = ROOT / "flaky.jsonl"
MOST = 2
"""Failures of one run that a second try may excuse."""
ALLOWED_SKIPS = ("no network interface but loopback",)
"""Parts of the reasons that CI takes."""
Line = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One failure, or those of all tests that one server failed to start for."""

    job: Job
    lines: tuple[Line, ...]

    @property
    def may_run_again(self) -> bool:
        known = {line["id"] for line in read([FLAKY])}
        return (
            self.job.has_servers
            and not any(line["final"] for line in self.lines)
            and not known & {line["id"] for line in self.lines}
        )


def read(records: Iterable[Path]) -> list[Line]:
    """Return the lines that tests wrote."""
    texts = [record.read_text() for record in records if record.exists()]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def skipped_in_vain(lines: Iterable[Line]) -> list[Line]:
    """Return the skips that fail a run in CI, where all that tests need is installed."""
    if not os.environ.get("CI"):
        return []
    skips = [line for line in lines if line["outcome"] == "skipped"]
    return [line for line in skips if not any(reason in line["error"] for reason in ALLOWED_SKIPS)]


def cases(job: Job, lines: Sequence[Line]) -> list[Case]:
    """Return the failures, those in one fixture's start together."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        if line["outcome"] == "failed":
            found.setdefault(line["error"] if line["when"] == "setup" else line["id"], []).append(line)
    return [Case(job, tuple(each)) for each in found.values()]


def run_again(failures: Sequence[Case], scratch: Path, deadline: float) -> tuple[list[Case], list[Case]]:
    """Run each alone, in a new process. Return those that count, and those that passed and were noted."""
    if len(failures) > MOST or not all(case.may_run_again for case in failures):
        return list(failures), []
    counted: list[Case] = []
    excused: list[Case] = []
    for number, case in enumerate(failures):
        ids = [line["id"] for line in case.lines]
        ended = run(pytest_job(f"servers: again {number}", scratch, *ids), scratch, deadline)
        (counted if ended.code else excused).append(case)
    for case in excused:
        _note(case)
    return counted, excused


def _note(case: Case) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    with FLAKY.open("a") as file:
        for line in case.lines:
            noted = {"commit": commit, "load": os.getloadavg()[0], "job": case.job.name, **line}
            file.write(json.dumps(noted) + "\n")
