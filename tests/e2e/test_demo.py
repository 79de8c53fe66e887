import json
from pathlib import Path

import pytest

from examples import rl_loop
from tests.e2e.conftest import Server


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises_by_learning_whatever_the_seed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    assert rl_loop.main(rl_loop.Options(out=tmp_path, seed=seed, steps=30))
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(30))
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
