"""Writes a line of JSON for each test to the file that --record names; scripts/test reads it."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="file for a line of JSON per test")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--record"):
        config.pluginmanager.register(_Records(path))


class _Records:
    """A line has id, outcome, seconds, core_s, and of what failed: when, error, final.

    `core_s`: CPU time of this process and of what it waited for. `final`: an assertion that a second run
    may not excuse, as of a number; what did not come about in time, or did not start, is none.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._final: dict[str, bool] = {}
        self._lines: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, used = time.monotonic(), _core_s()
        self._lines[item.nodeid] = {"id": item.nodeid, "outcome": "passed"}
        yield
        line = self._lines.pop(item.nodeid)
        line |= {"seconds": round(time.monotonic() - began, 2), "core_s": round(_core_s() - used, 2)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[pytest.TestReport]:
        report: pytest.TestReport = yield
        line = self._lines[item.nodeid]
        if report.skipped:
            line |= {"outcome": "skipped", "error": _reason(report)}
        elif report.failed and call.excinfo is not None and line["outcome"] != "failed":
            line |= {"outcome": "failed", "when": report.when, "error": call.excinfo.exconly()[:500]}
            line["final"] = _is_final(call.excinfo.value)
        return report


def _is_final(error: BaseException) -> bool:
    if isinstance(error, pytest.fail.Exception):  # a test that hung, or one that lacks an error
        return not str(error).startswith("Timeout")
    return isinstance(error, AssertionError)


def _reason(report: pytest.TestReport) -> str:
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _core_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
