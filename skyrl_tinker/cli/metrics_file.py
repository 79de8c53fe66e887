"""`skyrl-tinker follow`: the numbers of a script's metrics.jsonl, reported to its run as they are written."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from skyrl_tinker.cli.running_server import RunningServer, ServerAwayError
from skyrl_tinker.cli.terminal import tell
from skyrl_tinker.domain import tinker_path
from skyrl_tinker.errors import StartupError, UserError
from skyrl_tinker.protocol.schemas.base import MAX_INT64
from skyrl_tinker.protocol.schemas.console import MOST_NAME, MOST_REPORTED

POLL_S = 1.0
AWAY_S = 5.0
"""Time between two tries while the server is away."""


class Record(NamedTuple):
    """Numbers of one step, by name."""

    step: int
    values: dict[str, float]


def metrics_file(log_path: Path) -> Path:
    """Return the file of a script's directory, or of its own path. Raises StartupError without one."""
    file = log_path / "metrics.jsonl" if log_path.is_dir() else log_path
    if not file.is_file():
        raise StartupError(
            f"{log_path}: found no metrics.jsonl, expected the directory that a script logs to"
        )
    return file


def run_of(file: Path) -> str | None:
    """Return the run of the last checkpoint that the cookbook wrote down beside the metrics, if any."""
    try:
        lines = file.with_name("checkpoints.jsonl").read_text().splitlines()
        return tinker_path.parse(json.loads(lines[-1])["state_path"]).model_id
    except (OSError, IndexError, ValueError, KeyError, TypeError, UserError):
        return None


def report(server: RunningServer, run: str, record: Record) -> None:
    """Report a record, in as many requests as its numbers take; say so and wait while no server answers."""
    numbers, told = [*record.values.items()], False
    while numbers:
        try:
            server.report(run, record.step, dict(numbers[:MOST_REPORTED]))
            del numbers[:MOST_REPORTED]
        except ServerAwayError as error:
            if not told:
                tell(f"{error}; trying again every {AWAY_S:g} s")
            told = True
            time.sleep(AWAY_S)


def records(file: Path, *, on: bool) -> Iterator[Record]:
    """Yield the records of a file; with `on` also those to come, until the caller stops.

    A script that resumes writes the file again without the steps that it repeats: then from the beginning.
    """
    place = 0
    while True:
        if file.stat().st_size < place:
            place = 0
        with file.open("rb") as opened:
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
