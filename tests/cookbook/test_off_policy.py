"""Off-policy distillation: cross-entropy with a teacher's likeliest tokens, [N, K] targets, on given text."""

import numpy as np
import pytest
import tinker
from tinker_cookbook.renderers import Renderer

from tests.cookbook.support import data
from tests.cookbook.support.divergence import divergence, samplers
from tests.cookbook.support.kitchen import Kitchen, Run

pytestmark = pytest.mark.long


def test_the_student_learns_what_its_teacher_would_say(
    kitchen: Kitchen, service: tinker.ServiceClient, renderer: Renderer, taught: Run
) -> None:
    lessons = data.write_jsonl(kitchen.directory / "given.jsonl", data.lessons(96, turns=2))
    checkpoint = taught.checkpoints[-1]["sampler_path"]
    source = (f"dataset={lessons}", f"teacher_checkpoint={checkpoint}", "targets=4")
    settings = ("batch_size=8", "learning_rate=5e-3", "max_steps=10")
    run = kitchen.run("tests.cookbook.support.off_policy", "off_policy_distilled", *source, *settings)
    losses = np.array(run.column("train/loss:sum")) / run.column("train/weights:sum")
    assert losses[0] > 5
    assert losses[-1] < 1
    teacher, base, student = samplers(service, checkpoint, None, run.checkpoints[-1]["sampler_path"])
    before, after = (divergence(teacher, each, teacher, renderer) for each in (base, student))
    assert after < before / 4
