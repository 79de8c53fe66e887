"""Base models of one server."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from skyrl_tinker import config
from skyrl_tinker.errors import StartupError, UserError
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess
from skyrl_tinker.server import preflight
from skyrl_tinker.server.base_models.catalog import resolve_all
from skyrl_tinker.server.base_models.tiny_model import make_model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "teacher"
    make_model(directory, arch="llama", hidden=64, vocab=300)
    return directory


def test_the_first_is_trained_and_others_are_sampled_with_keys_of_their_own(
    tmp_path: Path, teacher: Path
) -> None:
    own = {"roles": ["sample"], "model_name": "org/teacher", "context_length": 100}
    bases = resolve_all(config.load(home=tmp_path, context_length=50, bases={str(teacher): own}))
    first, second = bases.all
    assert (first.name, first.trainable, first.context_length) == ("tiny", True, 50)
    assert (second.names, second.trainable) == (("org/teacher", str(teacher)), False)
    assert (second.context_length, second.vocab_size) == (100, 300)
    with pytest.raises(UserError, match=f"a server with --also {teacher}:train,sample trains it, too$"):
        bases.require_trainable("org/teacher")


def test_a_further_one_is_trained_if_its_roles_say_so(tmp_path: Path, teacher: Path) -> None:
    bases = resolve_all(config.load(home=tmp_path, bases=[f"{teacher}:train,sample"]))
    assert [facts.trainable for facts in bases.all] == [True, True]


def test_one_without_samplers_is_only_trained(tmp_path: Path, teacher: Path) -> None:
    bases = resolve_all(config.load(home=tmp_path, replicas=0, bases=[f"{teacher}:train"]))
    assert [(facts.trainable, facts.sampleable) for facts in bases.all] == [(True, False), (True, False)]


def test_one_directory_under_two_names_is_refused(tmp_path: Path, teacher: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(teacher)
    with pytest.raises(StartupError, match=f"bases: '{link}' is the directory of '{teacher}' once more"):
        resolve_all(config.load(home=tmp_path, base_model=str(teacher), bases=[str(link)]))


def test_refusals_name_the_base_model(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=rf"^bases\.{tmp_path}: --also {tmp_path}: no config.json in"):
        resolve_all(config.load(home=tmp_path, bases=[str(tmp_path)]))
    by_url = {"A": {"roles": ["sample"], "sampler_urls": ["localhost:9"]}}
    with pytest.raises(StartupError, match=r"^bases\.A: sampler_urls: found 'localhost:9'"):
        preflight.check_settings(config.load(bases=by_url))


def test_several_trained_ones_need_not_say_their_gpus_as_they_are_planned() -> None:
    own: dict[str, object] = {"roles": ["train", "sample"]}
    for device in ("cpu", "cuda"):
        preflight.check_settings(config.load(device=device, bases={"A": own}))
    first = {"device": "cuda", "trainer_ranks": 1, "replicas": 1}
    preflight.check_settings(config.load(**first, bases={"A": own | {"trainer_ranks": 1, "replicas": 1}}))


def test_one_that_is_only_trained_needs_no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Mock(side_effect=StartupError("vLLM is not installed"))
    monkeypatch.setattr(VllmProcess, "check", missing)
    preflight.check_settings(config.load(replicas=0, bases=["A:train"]))
    preflight.check_settings(config.load(replicas=0, device="cuda", trainer_dtype="float32"))
    with pytest.raises(StartupError, match="vLLM is not installed"):
        preflight.check_settings(config.load(replicas=0, bases=["A"]))
    several: dict[str, Any] = {"device": "cuda", "trainer_ranks": 1, "replicas": 0}
    own = {"roles": ["train"], "trainer_ranks": 1}
    preflight.check_settings(config.load(**several, bases={"A": own}))
    with pytest.raises(StartupError, match=r"^--replicas 0 and sampler_urls: the server either starts"):
        preflight.check_settings(config.load(replicas=0, sampler_urls=["http://a:9"]))
    with pytest.raises(StartupError, match=r"^--placement colocated and --replicas 0: found no samplers"):
        preflight.check_placement(config.load(replicas=0, placement="colocated"))


def test_a_server_by_url_samples_one_base_model() -> None:
    by_url = {"A": {"roles": ["sample"], "sampler_urls": ["http://a:9/"]}}
    preflight.check_settings(config.load(bases=by_url))
    with pytest.raises(StartupError, match=r"^bases\.A: sampler_urls: http://a:9 serves another base model"):
        preflight.check_settings(config.load(sampler_urls=["http://a:9"], bases=by_url))
