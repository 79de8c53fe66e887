"""Base models are found by any of their names."""

import re
from dataclasses import replace

import pytest

from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import UserError

STUDENT, TEACHER = (
    BaseModelFacts(f"/models/{name}", names, "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))
    for name, names in (("s", ("org/student", "/models/s")), ("t", ("org/teacher", "/models/t")))
)


def test_every_name_leads_to_its_base_model() -> None:
    bases = Bases((STUDENT, TEACHER))
    assert [bases.find(name) for name in ("org/student", "/models/s")] == [STUDENT] * 2
    assert bases.require("/models/t") is TEACHER
    assert bases.first is STUDENT


def test_a_base_model_that_is_not_served_is_named_with_those_that_are() -> None:
    with pytest.raises(UserError, match=r"base_model is 'x', expected one that is served: org/student$"):
        Bases((STUDENT,)).require("x")
    with pytest.raises(UserError, match=r"expected one that is served: org/student, org/teacher$"):
        Bases((STUDENT, TEACHER)).require("")


def test_one_that_is_sampled_only_is_not_trained() -> None:
    teacher = replace(TEACHER, trainable=False, given="teachers/t")
    bases = Bases((STUDENT, teacher))
    assert bases.require_trainable("/models/s") is STUDENT
    assert bases.require("/models/t") is teacher
    words = "base_model '/models/t' is served for sampling only (roles of base org/teacher), expected one"
    remedy = "a server with --also teachers/t:train,sample trains it, too"
    with pytest.raises(UserError, match=rf"^{re.escape(words)} that trains: org/student; {remedy}$"):
        bases.require_trainable("/models/t")
    with pytest.raises(UserError, match=r"^base_model is 'x', expected one that trains: org/student$"):
        bases.require_trainable("x")


def test_one_that_is_trained_only_is_not_sampled() -> None:
    student, teacher = (replace(facts, sampleable=False) for facts in (STUDENT, TEACHER))
    assert Bases((student, TEACHER)).require_sampleable(TEACHER) is TEACHER
    after = "; weights saved under a name can be sampled after a start of the server with samplers"
    for bases, refused, told in (
        ((student, TEACHER), student, "(replicas = 0), expected one that is sampled: org/teacher"),
        (
            (STUDENT, teacher),
            teacher,
            "(roles of base org/teacher), expected one that is sampled: org/student",
        ),
        ((student,), student, "(replicas = 0), expected one that is sampled: there is none"),
    ):
        words = f"base_model '{refused.name}' is served for training only {told}{after}"
        with pytest.raises(UserError, match=f"^{re.escape(words)}$"):
            Bases(bases).require_sampleable(refused)
    told = "^base_model is 'x', expected one that is sampled: "
    for bases, sampled in (((student, TEACHER), "org/teacher"), ((student,), "there is none")):
        with pytest.raises(UserError, match=f"{told}{sampled}$"):
            Bases(bases).require_sampled("x")
    with pytest.raises(UserError, match="is served for training only"):
        Bases((student, TEACHER)).require_sampled("/models/s")
