"""On-policy distillation: the student samples, the teacher scores."""

import numpy as np
import pytest

from tests.cookbook.support.kitchen import MODEL, RENDERER, TEACHER, Kitchen, Run
from tests.cookbook.test_rl import ON_POLICY, SMALL

pytestmark = pytest.mark.long


@pytest.mark.parametrize("another", [False, True], ids=["of its base model", "of another"])
def test_the_student_comes_nearer_to_its_teacher(kitchen: Kitchen, taught: Run, another: bool) -> None:
    early, *_, final = taught.checkpoints
    teacher = [f"teacher_model={MODEL}", f"teacher_checkpoint={final['sampler_path']}"]
    if another:
        teacher = [f"teacher_model={TEACHER}"]
    student = (f"load_checkpoint_path={early['state_path']}", f"renderer_name={RENDERER}")
    settings = ("groups_per_batch=4", "learning_rate=2e-3", "max_steps=6", "save_every=0", "eval_every=0")
    recipe, name = "distillation.on_policy_distillation", f"distilled-{another}"
    run = kitchen.cook(recipe, name, *teacher, *student, *SMALL, *settings)
    divergence = run.column("teacher_kl")
    assert np.mean(divergence[-2:]) < np.mean(divergence[:2]) - 0.5
    assert max(map(abs, run.column("optim/kl_sample_train_v1"))) <= ON_POLICY
