"""rl_loop, and math_rl in its three forms: synchronous, off-policy and streaming; all by stable_reinforce."""

import shlex

import numpy as np
import pytest
import tinker

from tests.cookbook.support.kitchen import RENDERER, Kitchen, Run
from tests.e2e.support.client import prompt
from tests.support.pages import block

pytestmark = pytest.mark.long

ON_POLICY = 1e-4  # mean difference of sampled and trained log-probabilities, in nats
SMALL = ("group_size=8", "max_tokens=24")


def test_the_recipe_of_the_page_learns(kitchen: Kitchen) -> None:
    """It runs as written, but for the server's model and the place of its log."""
    written = block("docs/cookbook.md: export TINKER_BASE_URL=http://127.0.0.1:8000 TINKE").text
    given = written.partition(" -m tinker_cookbook.recipes.math_rl.train ")[2]
    words = shlex.split(given.replace("\\\n", ""))
    settings = [word for word in words if word.partition("=")[0] not in ("model_name", "log_path")]
    run = kitchen.cook("math_rl.train", "page", *settings)
    rewards = run.column("env/all/reward/total")
    assert max(rewards[:2]) < -0.08
    assert np.mean(rewards[-3:]) > -0.02
    assert [each["name"] for each in run.checkpoints] == ["000010", "000020", "final"]


def test_rl_loop_learns(kitchen: Kitchen, taught: Run) -> None:
    """It resumes from a checkpoint in its log_path; here that is what sl_loop taught."""
    kitchen.log("rl_loop", taught.checkpoints[-1] | {"batch": 0})
    settings = ("batch_size=4", "learning_rate=5e-4", "save_every=6", "max_steps=12")
    run = kitchen.cook("rl_loop", "rl_loop", *SMALL, *settings)
    assert run.settings["loss_fn"] == "stable_reinforce"
    rewards = run.column("reward/total")
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
    assert [each["name"] for each in run.checkpoints] == ["final", "000006", "final"]


def math_rl(taught: Run, *arguments: str) -> tuple[str, ...]:
    start = f"load_checkpoint_path={taught.checkpoints[-1]['state_path']}"
    fixed = ("env=gsm8k", f"renderer_name={RENDERER}", "groups_per_batch=4", "learning_rate=5e-4", start)
    return (*SMALL, *fixed, "save_every=2", *arguments)


def test_synchronous_rl_is_on_policy_and_resumes(
    kitchen: Kitchen, service: tinker.ServiceClient, taught: Run
) -> None:
    for steps in (2, 4):  # the second goes on where the first ended
        settings = math_rl(taught, "eval_every=2", "compute_post_kl=True", f"max_steps={steps}")
        run = kitchen.cook("math_rl.train", "sync", *settings, "behavior_if_log_dir_exists=resume")
        assert run.column("step") == list(range(steps))
    assert run.settings["loss_fn"] == "stable_reinforce"
    assert run.column("optimizer_step") == [1, 2, 3, 4]
    assert max(map(abs, run.column("optim/kl_sample_train_v1"))) <= ON_POLICY
    assert min(run.column("kl_pre_post_v2")) > 1e-6  # each step moved the policy
    assert "test/env/all/reward/total" in run.metrics[0]
    for checkpoint in run.checkpoints:
        sampler = service.create_sampling_client(model_path=checkpoint["sampler_path"]).result()
        assert sampler.compute_logprobs(prompt([5, 6])).result()[0] is None


def test_off_policy_rl_trains_on_old_snapshots(kitchen: Kitchen, taught: Run) -> None:
    settings = math_rl(taught, "eval_every=0", "max_steps_off_policy=2", "max_steps=5")
    run = kitchen.cook("math_rl.train", "off_policy", *settings)
    assert run.settings["async_config"]["loss_fn"] == "stable_reinforce"
    assert run.column("step") == run.column("training_client/step") == list(range(5))
    staleness = run.column("async/staleness_max")
    assert staleness[0] == 0
    assert all(1 <= stale <= 2 for stale in staleness[1:])
    differences = run.column("optim/kl_sample_train_v2")
    assert differences[0] <= ON_POLICY**2
    assert min(differences[1:]) > 1e-6  # sampled by weights that have moved since


def test_streaming_rl_gathers_gradients_over_minibatches(kitchen: Kitchen, taught: Run) -> None:
    stream = ("stream_minibatch_config.groups_per_batch=4", "stream_minibatch_config.num_minibatches=2")
    settings = math_rl(taught, *stream, "eval_every=0", "max_steps=3")
    run = kitchen.cook("math_rl.train", "streaming", *settings)
    assert run.settings["loss_fn"] == "stable_reinforce"
    assert run.column("optimizer_step") == [1, 2, 3]
    assert run.column("sampling_client/step_min") == [0, 1, 2]
    assert max(map(abs, run.column("optim/kl_sample_train_v1"))) <= ON_POLICY
