"""Bound of captured state: its count, and the memory that it is a share of."""

import asyncio
from pathlib import Path

import psutil
import pytest

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.training.captured_bytes import CapturedBytes, host_memory

MODEL = ModelKey(1)


@pytest.fixture
def captured() -> CapturedBytes:
    captured = CapturedBytes()
    captured.most = 10
    captured.know(MODEL, 2, 6)
    return captured


def test_as_many_are_captured_as_fit_and_any_one_alone(captured: CapturedBytes) -> None:
    assert captured.fitting([4, 6, 4]) == 2
    assert captured.fitting([11, 4]) == 1
    captured.take(7, 4)
    assert captured.held == 4
    assert captured.fitting([6, 4]) == 1
    assert captured.fitting([11, 4]) == 0, "none passes it"


def test_a_capture_counts_with_the_moments_that_it_has(captured: CapturedBytes) -> None:
    assert captured.size(MODEL, optimizer=True) == 6
    assert captured.size(MODEL, optimizer=False) == 2
    captured.forget(MODEL)
    assert captured.size(MODEL, optimizer=True) == 0


async def test_what_is_freed_wakes_who_waits(captured: CapturedBytes) -> None:
    await captured.until_freed()
    captured.take(7, 4)
    waiting = asyncio.create_task(captured.until_freed())
    await asyncio.sleep(0)
    assert not waiting.done()
    late = captured.until_freed()
    captured.free(7)
    await waiting
    await late
    captured.free(7)
    assert captured.held == 0


def test_a_cgroup_bounds_the_memory(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    assert host_memory(own, tmp_path) == psutil.virtual_memory().total
    own.write_text("0::/pod/container\n")
    inner = tmp_path / "pod/container"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "pod/memory.max").write_text("4096\n")
    assert host_memory(own, tmp_path) == 4096
    (inner / "memory.max").write_text("1024\n")
    assert host_memory(own, tmp_path) == 1024


@pytest.mark.parametrize("inner", ["memory/pod/container", "memory/pod", "memory"])
def test_a_cgroup_of_version_1_bounds_the_memory(tmp_path: Path, inner: str) -> None:
    """A container may not see the directory of its own, but that of the root, which then has its limit."""
    own = tmp_path / "cgroup"
    own.write_text("5:cpuset:/other\n4:hugetlb,memory:/pod/container\n0::/\n")
    (tmp_path / inner).mkdir(parents=True)
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / inner / "memory.limit_in_bytes").write_text("4096\n")
    assert host_memory(own, tmp_path) == 4096
