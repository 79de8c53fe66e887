"""A rank imports and loads at a lower priority where it is told so, and works at that of its process."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import ray

from skyrl_tinker.training import actors, worker
from skyrl_tinker.training.actors import RankProcess
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.trainer_spec import TrainerSpec


@pytest.mark.parametrize("more", [0, 1])
def test_only_the_start_is_nice(
    ranks: Ranks, untied_model: str, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    found: dict[str, int] = {}

    def noted(module: Any, name: str) -> None:
        known: Callable[..., Any] = getattr(module, name)

        def noting(*arguments: Any) -> Any:
            found[name] = os.getpriority(os.PRIO_PROCESS, 0)  # of this thread
            return known(*arguments)

        monkeypatch.setattr(module, name, noting)

    noted(actors, "import_worker")
    noted(worker, "frozen_network")
    noted(worker, "freeze_gc")  # the last step
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    rank = RankProcess(TrainerSpec(untied_model, 1, "cpu", "float32", 1, 64, start_niceness=more), 0)
    rank.call("attach", ranks)
    assert found == {"import_worker": own + more, "frozen_network": own + more, "freeze_gc": own}
