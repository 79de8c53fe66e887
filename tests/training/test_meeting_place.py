"""Directory in which ranks of one host meet: there while their group is, and no longer."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from skyrl_tinker.training import actors
from skyrl_tinker.training.actors import Actors, RankReply
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker


async def test_a_group_that_has_ended_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However its ranks ended: they are killed, and remove nothing themselves."""
    monkeypatch.setattr(actors, "ray", MagicMock())
    monkeypatch.setattr(actors, "RankPlacement", MagicMock())
    spec = TrainerSpec("model", 1, "cpu", "float32", 1, 64, memory_root=str(tmp_path))
    worker = Worker(spec, 0)

    async def call(_: int, method: str, *args: Any) -> RankReply:
        return RankReply(worker.meeting_place(*args) if method == "meeting_place" else None, 0.0, 0.0)

    group = Actors(spec)
    placed: Any = group._placement
    placed.reserve, placed.wait_gone = AsyncMock(return_value=[{}]), AsyncMock()
    placed.hosts, placed.far_hosts = 1, []
    monkeypatch.setattr(group, "ping", AsyncMock())
    monkeypatch.setattr(group, "call", call)
    await group.join()
    assert len(os.listdir(tmp_path)) == 1
    await group.wait_gone()
    assert os.listdir(tmp_path) == []
