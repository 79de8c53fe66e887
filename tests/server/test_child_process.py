"""Deaths that the supervisor counts."""

import os
from pathlib import Path

import pytest

from skyrl_tinker import config
from skyrl_tinker.directories import Directories
from skyrl_tinker.server.child_process import MOST_DEATHS, ChildProcess


@pytest.fixture
def child(tmp_path: Path) -> ChildProcess:
    return ChildProcess(
        "engine", "skyrl_tinker.engine.engine_process", Directories(config.load(home=tmp_path))
    )


def test_the_fifth_of_quick_deaths_is_one_too_many(child: ChildProcess) -> None:
    assert [child.dies_too_often(1) for _ in range(MOST_DEATHS)] == [False] * (MOST_DEATHS - 1) + [True]


def test_a_death_for_want_of_time_never_counts(child: ChildProcess) -> None:
    assert not any(child.dies_too_often(os.EX_TEMPFAIL) for _ in range(2 * MOST_DEATHS))
    assert [child.dies_too_often(-9) for _ in range(MOST_DEATHS)][-1]
