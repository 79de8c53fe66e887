"""DPO against a reference, and RL with a reward model of another base model."""

import math

import pytest
import tinker

from tests.cookbook.support.kitchen import MODEL, RENDERER, TEACHER, Kitchen, Run

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


def test_a_reward_model_of_another_base_model_judges(kitchen: Kitchen) -> None:
    recipe = "tinker_cookbook.recipes.preference.rlhf.rlhf_pipeline"
    common = ("short_name=judged", "lora_rank=8", "max_length=512", "save_every=0", "eval_every=0")
    judge = (f"base_model={TEACHER}", "batch_size=8", "rm_learning_rate=6e-3", "max_steps=4")
    kitchen.call(recipe, *common, *judge, "run_sft=False", "run_rl=False")
    policy = (f"base_model={MODEL}", "batch_size=8", "sft_learning_rate=6e-3", "max_steps=20")
    kitchen.call(recipe, *common, *policy, "run_rm=False", "run_rl=False")
    judged = (f"base_model={MODEL}", "batch_size=4", "rl_max_tokens=12", "max_steps=2")
    told = kitchen.call(recipe, *common, *judged, "run_sft=False", "run_rm=False")
    assert "Invalid output" not in told, "the judge answers with what only its own training has taught it"
    reward_model, trained = (kitchen.log(f"rlhf-judged/{stage}") for stage in ("rm", "rl"))
    rest = tinker.RestClient(base_url=kitchen.url, api_key="tml-local")
    paths = (run.checkpoints[-1]["state_path"] for run in (reward_model, trained))
    infos = [rest.get_weights_info_by_tinker_path(path).result() for path in paths]
    assert [each.base_model for each in infos] == [TEACHER, MODEL]
    assert trained.column("env/all/total_episodes") == [16, 16]
    losses = reward_model.column("train_mean_nll")
    assert losses[-1] < losses[0] - 1
