from types import SimpleNamespace

import pytest

from skyrl_tinker.inference.plugin import patches


@pytest.mark.parametrize("on_cpu", [True, False])
def test_another_release_of_vllm_is_refused_on_any_device(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    monkeypatch.setattr(patches, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    monkeypatch.setattr(patches, "vllm_version", "0.33.1")
    registered = dict(patches.WeightTransferEngineFactory._registry)
    with pytest.raises(RuntimeError, match=r"for vLLM 0\.32\.x, found 0\.33\.1: install that release"):
        patches.apply()
    assert patches.WeightTransferEngineFactory._registry == registered
