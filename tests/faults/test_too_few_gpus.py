from collections.abc import Callable

import pytest

from tests.support.serve import Serve


@pytest.mark.parametrize(
    "options",
    [
        ("--placement", "auto"),
        pytest.param(("--placement", "separate"), marks=pytest.mark.long),
        pytest.param(("--no-plan",), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_cuda_without_gpus_is_refused_with_how_many_it_takes(
    start: Callable[..., Serve], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    server = start("--device", "cuda", "--trainer-ranks", "2", *options)
    _, said = server.process.communicate(timeout=300)
    assert server.process.returncode == 1
    assert "--device cuda needs 3 GPUs (2 for trainer ranks, 1 for samplers), found 0" in said
