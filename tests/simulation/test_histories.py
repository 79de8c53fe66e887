"""Crash histories against the sequential truth; scripts/simulate runs any number of others."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from skyrl_tinker.engine.trainer import trainer_driver
from skyrl_tinker.store.database.migrate import migrate
from tests.simulation.history import POINTS, History

HISTORIES = 200


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_driver, "IDLE_S", 0.005)


@pytest.mark.timeout(600)
def test_every_request_is_answered_once_and_every_model_is_what_it_must_be(tmp_path: Path) -> None:
    template = tmp_path / "template.db"
    migrate(f"sqlite+aiosqlite:///{template}")
    hit: Counter[str] = Counter()
    for seed in range(HISTORIES):
        history = History(seed, tmp_path / str(seed), template)
        try:
            asyncio.run(history.run())
        except BaseException as error:
            error.add_note(f"seed {seed}, crashes {dict(history.crashes.hit)}")
            raise
        hit += history.crashes.hit
    assert set(hit) == set(POINTS), "every point is reached"
