"""Releases of vLLM that the plugin accepts, and patches that it refuses by name."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm

from skyrl_tinker.inference.vllm.plugin import patch_set

ROOT = Path(vllm.__path__[0])


@pytest.fixture
def unapplied(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Keep a refusal from being hidden by patches that this process has applied."""
    monkeypatch.setattr(patch_set.WeightTransferEngineFactory, "_registry", {})
    monkeypatch.setattr(patch_set, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    return monkeypatch


def without(target: str, file: Path) -> Path:
    table = json.loads(patch_set.LISTED.read_text())
    file.write_text(json.dumps({name: known for name, known in table.items() if name != target}))
    return file


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0"])
def test_another_release_of_vllm_is_refused(unapplied: pytest.MonkeyPatch, version: str) -> None:
    unapplied.setattr(patch_set, "vllm_version", version)
    with pytest.raises(RuntimeError, match=rf"for vLLM 0\.32\.x and vLLM 0\.33\.x, found {version}"):
        patch_set.apply()
    assert not patch_set.WeightTransferEngineFactory._registry


def test_every_target_of_the_installed_release_is_in_the_table() -> None:
    table = json.loads(patch_set.LISTED.read_text())
    targets = {target for patch in (*patch_set.PATCHES, *patch_set.ON_CPU) for target in patch.targets}
    assert table.keys() == targets
    assert patch_set.unknown(ROOT, targets) == []
    assert all(known.keys() == set(patch_set.releases()) for known in table.values())


def test_a_patch_whose_target_is_unknown_is_refused_by_name(
    unapplied: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = "v1.engine.output_processor:RequestState.make_request_output"
    unapplied.setattr(patch_set, "LISTED", without(target, tmp_path / "table.json"))
    message = rf"patch request_patches\.count_cached_prompts_once, needed always, .*{target}.* Install 0\.32"
    with pytest.raises(RuntimeError, match=message):
        patch_set.apply()
    assert not patch_set.WeightTransferEngineFactory._registry


def test_a_patch_that_not_all_need_is_refused_when_vllm_calls_its_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factory = patch_set.WeightTransferEngineFactory
    monkeypatch.setattr(factory, "create_engine", factory.create_engine)  # restored afterwards
    gate = "distributed.weight_transfer:WeightTransferEngineFactory.create_engine"
    patch_set._refuse_at(gate, "needed for gpt-oss")
    with pytest.raises(RuntimeError, match="needed for gpt-oss"):
        factory.create_engine("any", None, None, None)  # type: ignore[arg-type]


FUNCTION = "    def f(\n        self,\n    ) -> int:\n        return 1\n"
OTHER = "class B:\n    def f(self): ...\n\n\n"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (f"class A:\n{FUNCTION}\n    x = 2\n", True),
        (f"{OTHER}class A:\n{FUNCTION}", True),
        (f"class A:\n{FUNCTION}".replace("1", "2"), False),
        (f"class A:\n    pass\n\n\n{OTHER}", False),
    ],
    ids=["as it was", "moved", "changed", "gone"],
)
def test_a_target_is_known_by_its_own_source(tmp_path: Path, text: str, same: bool) -> None:
    (tmp_path / "one.py").write_text(f"class A:\n{FUNCTION}")
    (tmp_path / "two.py").write_text(text)
    found = patch_set.digest(tmp_path, "one:A.f")
    assert found is not None
    assert (patch_set.digest(tmp_path, "two:A.f") == found) == same
