"""scripts/mutants has a list that fits the package, and says which mutants no test notices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECRET = "return redact(super().format(record))"
LIST = f"""
[redaction]
file = "skyrl_tinker/redaction.py"
tests = ["tests/test_redaction.py"]

[redaction.mutants.seen]
old = '{SECRET}'
new = "return super().format(record)"

[redaction.mutants.unseen]
old = '"Formatter of log records, tracebacks included."'
new = '"Formatter."'
"""


def mutants(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts/mutants", "--jobs", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_mutant_changes_one_place_and_names_tests_that_there_are() -> None:
    ended = mutants("--list")
    assert ended.returncode == 0, ended.stderr
    names = [line.split()[0] for line in ended.stdout.splitlines()]
    assert len(names) == len(set(names)) >= 60


def test_a_mutant_that_no_test_notices_is_an_error_and_the_checkout_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(LIST)
    ended = mutants("--mutants", tmp_path / "list")
    assert ended.returncode == 1, ended.stderr
    seen, unseen, last = ended.stdout.splitlines()
    assert "killed by tests/test_redaction.py::test_log_lines_and_tracebacks_are_without_secrets" in seen
    assert unseen.startswith("redaction/unseen ")
    assert "ALIVE" in unseen
    report = json.loads(last)
    expected = {"mutants": 2, "killed": 1, "alive": ["redaction/unseen"], "hung": [], "failing": []}
    assert report == expected | {"seconds": report["seconds"]}
    assert SECRET in (ROOT / "skyrl_tinker/redaction.py").read_text()


def test_mutants_that_are_all_noticed_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(LIST)
    ended = mutants("--mutants", tmp_path / "list", "redaction/seen")
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("text", "other", "fault"),
    [
        (SECRET, "return redact(record)", "found its old text 0 times in skyrl_tinker/redaction.py"),
        ('"return super().format(record)"', f"'{SECRET}'", "its new text is the old one"),
        (
            "test_redaction.py",
            "test_redaction.py::test_none",
            "there is no test tests/test_redaction.py::test_none",
        ),
    ],
)
def test_a_mutant_that_does_not_fit_is_named(tmp_path: Path, text: str, other: str, fault: str) -> None:
    (tmp_path / "list").write_text(LIST.replace(text, other))
    ended = mutants("--mutants", tmp_path / "list", "--list")
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"redaction/seen: {fault}")
