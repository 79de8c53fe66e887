"""Print the collectives of a row on one of eight ranks, with no, one and two recomputed layers, as JSON.

A process of its own, since it forms a process group.
"""

import json
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.training.memory.row_profile import FakeTrainer, Training, fake_ranks


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[list[int]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            shapes = [list(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
            self.found.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def collectives(config: dict[str, Any], rank: int, recompute: int) -> list[tuple[str, list[list[int]]]]:
    with fake_ranks(8) as ranks:
        lora = LoraSpec(rank, 0)
        trainer = FakeTrainer(Training(config, "cuda", "bfloat16", lora), ranks)
        trainer.measure(64, recompute=recompute)  # in the first row, FSDP still allocates
        with Collectives() as mode:
            trainer.measure(64, recompute=recompute)
    return mode.found


if __name__ == "__main__":
    model = json.loads(sys.argv[1])
    print(json.dumps([[collectives(model, rank, recompute) for recompute in range(3)] for rank in (8, 0)]))
