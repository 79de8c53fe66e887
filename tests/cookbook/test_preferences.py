"""DPO: `forward_backward_custom` against a reference that is a sampling client."""

import math

import pytest

from tests.cookbook.support.kitchen import RENDERER, Kitchen, Run

pytestmark = pytest.mark.long


def test_dpo_prefers_what_was_chosen(kitchen: Kitchen, taught: Run) -> None:
    start = f"load_checkpoint_path={taught.checkpoints[-1]['state_path']}"
    settings = (
        "dataset=hhh",
        f"renderer_name={RENDERER}",
        "batch_size=8",
        "max_length=512",
        "learning_rate=3e-4",
    )
    run = kitchen.cook("preference.dpo.train", "dpo", start, *settings)
    losses = run.column("dpo_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)  # policy and reference agree
    assert max(losses[1:]) < losses[0] - 0.005
    assert run.metrics[-1]["accuracy"] == 1
    assert [each["name"] for each in run.checkpoints] == ["final"]
