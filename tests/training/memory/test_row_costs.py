"""Costs from few layers and tokens are those of all of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import StartupError
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory import row_costs
from skyrl_tinker.training.memory.row_costs import measure_costs
from skyrl_tinker.training.memory.row_profile import FakeTrainer, RowProfile, Training
from skyrl_tinker.training.models.lora import LoraModel


def _training(directory: str, lora: LoraSpec, **config: Any) -> Training:
    found = json.loads((Path(directory) / "config.json").read_text())
    # a vocabulary so large that no logits are kept for backward, whatever the row
    larger = {"vocab_size": 1 << 17, "max_position_embeddings": 1024} | config
    return Training(found | larger, "cuda", "bfloat16", lora)


@pytest.mark.long
@pytest.mark.parametrize("rank", [8, 0])
def test_other_layers_and_tokens_cost_what_was_computed(ranks: Ranks, untied_model: str, rank: int) -> None:
    training = _training(untied_model, LoraSpec(rank, 0)).with_layers(7)
    costs = measure_costs(training, 8192, ranks)
    trainer = FakeTrainer(training, ranks)
    for again in range(8):
        longest = trainer.measure(8192, recompute=again)
        assert costs.row(8192).needed(again) == pytest.approx(longest.peak, rel=0.01)
        middle = trainer.measure(4096, recompute=again).peak
        assert 0.99 * middle <= costs.row(4096).needed(again) <= 1.05 * middle
        shorter = trainer.measure(1024, recompute=again).peak
        assert costs.row(1024).needed(again) >= shorter  # below a chunk of logits, which then is smaller
    own = longest.state + (longest.weights if rank == 0 else 0)
    assert costs.state == pytest.approx(own, rel=1e-3)  # buffers are no part of it
    assert costs.parameters == sum(parameter.numel() for parameter in trainer.network.parameters())
    assert costs.trained == pytest.approx(costs.state / 16, rel=1e-3)
    assert costs.recomputed.per_token < costs.kept.per_token / 2


def test_a_model_that_the_trainer_refuses_is_refused(ranks: Ranks, untied_model: str) -> None:
    kinds = ["full_attention"] * 5 + ["linear_attention"]
    training = _training(untied_model, LoraSpec(8, 0), layer_types=kinds, num_hidden_layers=6)
    with pytest.raises(StartupError, match="layers of type linear_attention"):
        measure_costs(training, 1024, ranks)


def test_a_trainer_is_built_once_for_both_kinds_of_rows_and_not_filled(
    ranks: Ranks, untied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 128 experts that is most of the time of a plan. Of fewer layers no backward pass is needed."""
    built: list[int] = []
    measured: list[tuple[int, bool]] = []

    class Counted(FakeTrainer):
        def __init__(self, training: Training, ranks: Ranks) -> None:
            built.append(training.config["num_hidden_layers"])
            super().__init__(training, ranks)

        def measure(self, tokens: int, *, recompute: bool | None = None, backward: bool = True) -> RowProfile:
            measured.append((self.training.config["num_hidden_layers"], backward))
            return super().measure(tokens, recompute=recompute, backward=backward)

    monkeypatch.setattr(row_costs, "FakeTrainer", Counted)
    monkeypatch.setattr(LoraModel, "_initialise", lambda _: pytest.fail("it has no content"))
    measure_costs(_training(untied_model, LoraSpec(8, 0)), 1024, ranks)
    assert built == [2, 3]
    assert measured == 4 * [(2, False), (3, True)]
