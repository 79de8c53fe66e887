"""`skyrl-tinker follow`: the numbers of a script's metrics.jsonl, reported to its run as they are written."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from skyrl_tinker.cli.running_server import RunningServer, ServerAwayError
from skyrl_tinker.cli.terminal import tell
from skyrl_tinker.domain import tinker_path
from skyrl_tinker.errors import StartupError, UserError
from skyrl_tinker.protocol.schemas.base import MAX_INT64
from skyrl_tinker.protocol.schemas.console import MOST_NAME, MOST_REPORTED

T = TypeVar("T")
POLL_S = 1.0
AWAY_S = 5.0
"""Time between two tries while the server is away."""
_CHECKPOINTS = "checkpoints.jsonl"
_LOOKED_AT = 200  # runs, the last used first


class Record(NamedTuple):
    """Numbers of one step, by name."""

    step: int
    values: dict[str, float]


def metrics_file(log_path: Path, *, on: bool) -> Path:
    """Return the file of a script's directory, or of its own path; with `on` once the script has begun it.

    Raises StartupError if it is not there and not waited for.
    """
    file = log_path if log_path.is_file() or log_path.suffix == ".jsonl" else log_path / "metrics.jsonl"
    if not file.is_file() and not on:
        raise StartupError(
            f"{log_path}: found no metrics.jsonl, expected the directory that a script logs to"
        )
    if not file.is_file():
        tell(f"{file}: not there yet; a script writes it with its first step")
    while not file.is_file():
        time.sleep(POLL_S)
    return file


def run_of(file: Path, server: RunningServer) -> str | None:
    """Return the run that writes the metrics, None before its first checkpoint.

    It is the run of the last checkpoint that the cookbook wrote down beside them. A script that resumes goes
    on from that as another run, which is known by its parent until it has a checkpoint itself: it has taken
    a step, nothing came from its parent's script since it was made, and the metrics were written after that.
    Raises StartupError if the server does not have it.
    """
    if (saved := _saved(file)) is None:
        return None
    runs = _answered(partial(_last_used, server, saved))
    if saved not in runs:
        require_run(server, saved, file.with_name(_CHECKPOINTS))
        return saved
    heirs = [
        (_time(each["created_at"]), run)
        for run, each in runs.items()
        if each["parent"] == saved and each["steps"]  # exports have a run without steps
    ]
    if not heirs:
        return saved
    made, heir = max(heirs)
    alive = max(_time(runs[saved][sign]) for sign in ("last_heartbeat_at", "last_request_at"))
    return heir if alive < made < file.stat().st_mtime else saved


def _last_used(server: RunningServer, run: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the runs used last by id, or this one alone if it is the last: then nobody has resumed it."""
    for most in (1, _LOOKED_AT):
        found = {str(each["run_id"]): each for each in server.runs(most)["runs"]}
        if run in found:
            break
    return found


def _saved(file: Path) -> str | None:
    try:
        lines = file.with_name(_CHECKPOINTS).read_text().splitlines()
        return tinker_path.parse(json.loads(lines[-1])["state_path"]).model_id
    except (OSError, IndexError, ValueError, KeyError, TypeError, UserError):
        return None


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def require_run(server: RunningServer, run: str, source: object) -> None:
    """Raise StartupError for a run that the server does not have, with the `source` that names it."""
    if not _answered(partial(server.has_run, run)):
        raise StartupError(
            f"{source}: found run {run}, expected the id of one of {server.url} (`skyrl-tinker runs`)"
        )


def report(server: RunningServer, run: str, record: Record) -> None:
    """Report a record, in as many requests as its numbers take."""
    numbers = [*record.values.items()]
    for first in range(0, len(numbers), MOST_REPORTED):
        part = dict(numbers[first : first + MOST_REPORTED])
        _answered(partial(server.report, run, record.step, part))


def _answered(ask: Callable[[], T]) -> T:
    """Return an answer; say so and wait while no server gives one."""
    told = False
    while True:
        try:
            return ask()
        except ServerAwayError as error:
            if not told:
                tell(f"{error}; trying again every {AWAY_S:g} s")
            told = True
            time.sleep(AWAY_S)


def records(file: Path, *, on: bool) -> Iterator[Record]:
    """Yield the records of a file; with `on` also those to come, until the caller stops.

    A script that resumes writes the file again without the steps that it repeats: then from the beginning.
    Raises StartupError once the file is gone, as when a script begins anew: what comes is of another run.
    """
    place = 0
    while True:
        try:
            opened = file.open("rb")
        except FileNotFoundError as error:
            raise StartupError(f"{file}: it is gone; follow the script that writes it anew") from error
        with opened:
            if opened.seek(0, os.SEEK_END) < place:
                place = 0
            opened.seek(place)
            for line in opened:
                if not line.endswith(b"\n") and on:  # it is being written
                    break
                place += len(line)
                if record := _record(line):
                    yield record
        if not on:
            return
        time.sleep(POLL_S)


def _record(line: bytes) -> Record | None:
    """Return the finite numbers of a line, None of one without any or without its step."""
    try:
        found = json.loads(line)
        step = found.pop("step")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    values = {name: value for name, value in found.items() if _is_reported(name, value)}
    return Record(step, values) if isinstance(step, int) and 0 <= step <= MAX_INT64 and values else None


def _is_reported(name: str, value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool) or "\0" in name:
        return False
    return 0 < len(name) <= MOST_NAME and abs(value) <= sys.float_info.max
