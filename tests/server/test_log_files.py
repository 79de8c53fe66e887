"""Logs stay bounded while processes go on writing to them."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_tinker.server import child_process
from tests.support.waiting import wait_until

LINE = 50
PYDANTIC = "    For further information visit https://errors.pydantic.dev/2.14/v/value_error"
COUNTS = f"""
import itertools
for number in itertools.count():
    print(str(number).zfill({LINE - 1}), flush=True)
"""
ECHOES = """
import sys
for line in sys.stdin:
    print(line, end="", flush=True)
    print("done", file=sys.stderr, flush=True)
"""


@contextmanager
def writer(log: Path, program: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that writes to the log as ours do."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_what_has_been_written_is_kept_for_two_generations(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with writer(log, ECHOES) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        for number in range(5):
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            process.stderr.readline()
            child_process.rotate(tmp_path, limit=1)
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found == {"engine.log": "", "engine.log.1": "4\n", "engine.log.2": "3\n"}


def test_a_process_that_never_pauses_is_bounded_and_its_lines_stay_in_order(tmp_path: Path) -> None:
    log, limit = tmp_path / "engine.log", 200 * LINE
    rotations = itertools.count(1)

    def rotated() -> bool:
        """Rotate; tell whether it was the tenth time that there was something to do."""
        size = log.stat().st_size
        child_process.rotate(tmp_path, limit)
        return size > limit and next(rotations) == 10

    with writer(log, COUNTS):
        wait_until(rotated)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["engine.log", "engine.log.1", "engine.log.2"]
    text = "".join((tmp_path / f"engine.log{end}").read_text() for end in (".2", ".1", ""))
    whole = [line for line in text.splitlines() if len(line) == LINE - 1]
    edges = 4  # before the oldest file, between the three, after the newest
    assert len(text.splitlines()) - len(whole) <= edges, "lines are cut that lie at no truncation"
    numbers = [int(line) for line in whole]
    assert all(earlier < later for earlier, later in itertools.pairwise(numbers))


def test_a_log_within_its_bound_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "api.log").write_text("a")
    child_process.rotate(tmp_path, limit=1)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "none"),
        ("\n \n", "none"),
        ("a\n b \n\n", "b"),
        ("x\n" * 100_000 + "last", "last"),
        (f"a\n  b\n{PYDANTIC}\n\n", "b"),
        (PYDANTIC, "none"),
    ],
)
def test_the_last_line_is_the_last_that_tells_something(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "api.log").write_text(text)
    assert child_process.last_line(tmp_path / "api.log") == line
