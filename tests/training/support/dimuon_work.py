"""Print the operations (FLOP) of a Dimuon step of a full-parameter model on rank 0 of one and two, as JSON.

A process of its own, since it forms process groups.
"""

import json
import sys
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import DimuonParams, LoraSpec
from skyrl_tinker.training.memory.row_profile import FakeTrainer, Training, fake_ranks
from skyrl_tinker.training.models.full_parameter import FullModel
from skyrl_tinker.training.models.trainable_model import Part
from skyrl_tinker.training.optimizers import dimuon


def work(config: dict[str, Any], world: int) -> int:
    with fake_ranks(world) as ranks:
        trainer = FakeTrainer(Training(config, "cpu", "float32"), ranks)
        with trainer._mode, FlopCounterMode(display=False) as counter:
            model = FullModel(ModelKey(1), LoraSpec(0, 0), trainer.network, ranks, "dimuon")
            gradients = [torch.zeros_like(weight) for weight in model.local(Part.WEIGHT)]
            model.bounds = dict.fromkeys((Part.WEIGHT, Part.MOMENTUM), 1.0)  # fake tensors have no values
            dimuon.apply(model, gradients, 0.0, DimuonParams(0.02), ranks)
    return counter.get_total_flops()


if __name__ == "__main__":
    model_config = json.loads(sys.argv[1])
    print(json.dumps([work(model_config, world) for world in (1, 2)]))
