"""The command behind scripts/test."""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tiers import changed, verdict
from tiers.jobs import ROOT, Job, check_jobs, deterministic_jobs, pytest_job, server_jobs
from tiers.running import Ended, run_all
from tiers.verdict import Case, Line

MOST_S = 45 * 60.0
SLOWEST = 15


class Suite:
    """One run of scripts/test."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._began = time.monotonic()
        self._deadline = self._began + MOST_S
        self._ended: list[Ended] = []
        self._lines: list[Line] = []
        self._failures: list[Case] = []
        self._broken: list[str] = []
        """Jobs that failed without a test that did."""

    def run(self, jobs: Sequence[Job]) -> int:
        for ended in run_all(jobs, self._scratch, self._deadline):
            self._take(ended)
        counted, excused = verdict.run_again(self._failures, self._scratch, self._deadline)
        return self._report(counted, excused)

    def _take(self, ended: Ended) -> None:
        self._ended.append(ended)
        lines = verdict.read([ended.job.record] if ended.job.record else [])
        self._lines += lines
        failures = verdict.cases(ended.job, lines)
        self._failures += failures
        nothing_to_do = ended.job.record is not None and ended.code == 5
        if ended.code and not failures and not nothing_to_do:
            self._broken.append(ended.job.name)
        failed = bool(ended.code) and not nothing_to_do
        if failed:
            print(ended.output.read_text(errors="replace"))
        said = "FAILED" if failed else "ok"
        print(f"{ended.job.name:22} {said:6} {ended.seconds:6.0f} s  {ended.core_s:6.0f} core-s", flush=True)

    def _report(self, counted: Sequence[Case], excused: Sequence[Case]) -> int:
        skips = verdict.skipped_in_vain(self._lines)
        for line in sorted(self._lines, key=lambda line: -line["seconds"])[:SLOWEST]:
            print(f"{line['seconds']:8.1f} s {line['core_s']:7.1f} core-s  {line['id']}")
        for title, lines in (
            ("FLAKY, noted in flaky.jsonl", [line for case in excused for line in case.lines]),
            ("SKIPPED, which CI does not take", skips),
            ("FAILED", [line for case in counted for line in case.lines]),
        ):
            for line in lines:
                print(f"{title}: {line['id']}: {line['error'].splitlines()[0]}")
        for name in self._broken:
            print(f"FAILED: {name}")
        print(json.dumps(self._figures(counted, excused, skips)))
        return 1 if counted or skips or self._broken else 0

    def _figures(self, counted: Sequence[Case], excused: Sequence[Case], skips: Sequence[Line]) -> Line:
        outcomes = [line["outcome"] for line in self._lines]
        return {
            "passed": outcomes.count("passed"),
            "failed": sum(len(case.lines) for case in counted) + len(self._broken),
            "flaky": sum(len(case.lines) for case in excused),
            "skipped": outcomes.count("skipped"),
            "skipped_in_vain": len(skips),
            "seconds": round(time.monotonic() - self._began),
            "core_s": round(sum(ended.core_s for ended in self._ended)),
            "load": round(os.getloadavg()[2], 1),
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="leave out what starts servers, Ray or vLLM")
    parser.add_argument("--changed", nargs="?", const="origin/main", metavar="REVISION")
    parser.add_argument("--keep", type=Path, help="directory for the outputs and a line of JSON per test")
    arguments, given = parser.parse_known_args()
    scratch = arguments.keep or Path(tempfile.mkdtemp(prefix="skyrl-tinker-test-"))
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        return Suite(scratch).run(_chosen(arguments, given, scratch))
    finally:
        if not arguments.keep:
            shutil.rmtree(scratch, ignore_errors=True)


def _chosen(arguments: argparse.Namespace, given: list[str], scratch: Path) -> list[Job]:
    if arguments.changed:
        given = changed.reached_tests(ROOT, changed.files(ROOT, arguments.changed))
        marked = ["-m", "not long", *given]
        return [*check_jobs(), *([pytest_job("changed", scratch, *marked)] if given else [])]
    if given:
        return [*check_jobs(), pytest_job("tests", scratch, *given)]
    servers = [] if arguments.quick else server_jobs(scratch)
    return [*servers, *check_jobs(), *deterministic_jobs(scratch)]  # mypy takes as long as a minute


if __name__ == "__main__":
    sys.exit(main())
