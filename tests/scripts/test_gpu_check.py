"""scripts/gpu-check --cpu holds here, with two ranks and without the server's packages, and can fail."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_check import attention, fused, kernels, logprobs, rows
from gpu_check.kernels import Interval
from gpu_check.rows import BROKEN, HELD, Row
from gpu_check.setting import Setting

SCRIPTS = Path(__file__).parents[2] / "scripts"
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pydantic", "orjson", "ray", "vllm", "fastapi", "sqlalchemy", "pytest"}:
            raise ImportError(f"{name} is refused here")

sys.meta_path.insert(0, Refuse())
"""
NOT_ON_CPU = {
    "GPU",
    "torch.mm(out_dtype=float32)",
    "offload: share of GPU memory left",
    "eviction: GPU memory that a second adapter takes",
    "out of memory",
    "CUDA IPC between two processes",
}
SMALL = Setting("cpu")


def _run(program: list[str], path: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, *program], env=environment, capture_output=True, text=True, check=False
    )
    return ended, json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.timeout(600)  # 50 s on an idle core
def test_all_parts_hold_on_a_cpu_without_the_servers_packages(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    ended, found = _run([str(SCRIPTS / "gpu-check"), "--cpu", "--ranks", "2"], str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert found["ok"]
    assert {row["name"] for row in found["rows"] if row["ok"] == "-"} == NOT_ON_CPU
    names = " ".join(row["name"] for row in found["rows"])
    for part in (
        "torch",
        "attention",
        "SwiGLU",
        "frozen head",
        "recomputed or not",
        "checkpoint of",
        "captured weights",
        "3 ranks, cpu float32",
        "published while training on 3 ranks",
        "one of 3 ranks has no memory",
    ):
        assert part in names
    for layers in ("kept", "recomputed", "as memory allows"):
        assert f"layers {layers}, head adapted" in names


FAULTS = """
import os, signal, sys, time
from gpu_check import command
from gpu_check.checks import Check
from gpu_check.rows import at_most, measured

def broken():
    yield at_most("too much", 2.0, 1.0)
    raise ValueError("in the middle")

def fine():
    yield measured("fine", 1.0)

def killed():
    yield measured("before", 1.0)
    os.kill(os.getpid(), signal.SIGKILL)

def slow():
    time.sleep(600)
    yield from fine()

command.PARTS = {
    "broken": lambda setting: [Check("broken", broken), Check("fine", fine)],
    "killed": lambda setting: [Check("killed", killed)],
    "slow": lambda setting: [Check("slow", slow)],
    "late": lambda setting: [Check("late", fine)],
}
sys.exit(command.main())
"""


def test_whatever_a_part_does_the_rest_is_checked_and_said() -> None:
    path = f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}"
    ended, found = _run(["-c", FAULTS, "--cpu", "--minutes", "0.1"], path)
    assert ended.returncode == 1
    assert not found["ok"]
    assert [(row["name"], row["ok"]) for row in found["rows"]] == [
        ("too much", "NO"),
        ("broken", "NO"),
        ("fine", "yes"),
        ("before", "yes"),
        ("part killed", "NO"),
        ("part slow", "NO"),
        ("part late", "NO"),
    ]
    texts = {row["name"]: row["value"] for row in found["rows"]}
    assert texts["broken"] == "ValueError: in the middle"
    assert "exit code -9" in texts["part killed"]
    assert "time is up" in texts["part late"]


def test_without_a_gpu_it_says_so_and_fails() -> None:
    ended, found = _run([str(SCRIPTS / "gpu-check")], "")
    assert ended.returncode == 1
    assert [row["name"] for row in found["rows"]] == ["GPU"]
    assert "--cpu" in found["rows"][0]["value"]


def _ok(found: Iterator[Row]) -> set[str]:
    return {row.ok for row in found}


def test_logits_in_bfloat16_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (check, *_) = logprobs.checks(SMALL)
    assert _ok(check.rows()) == {HELD}

    def rounded(hidden: Any, head: Any, targets: Any, **_: Any) -> torch.Tensor:
        logits = (hidden @ head.weight.T).float()
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    monkeypatch.setattr(logprobs, "token_logprobs", rounded)
    assert BROKEN in _ok(check.rows())


@pytest.mark.parametrize("segments", [((2, 68), (1, 1)), ((1, 137),)], ids=["other segments", "one segment"])
def test_attention_across_segments_is_found(
    monkeypatch: pytest.MonkeyPatch, segments: tuple[tuple[int, int], ...]
) -> None:
    _, check, *_ = attention.checks(SMALL)
    assert _ok(check.rows()) == {HELD}
    _, kernel = attention.attention.choose("cpu", torch.float32)
    monkeypatch.setattr(
        attention.attention,
        "choose_newest",
        lambda *_: ("wrong", lambda given: kernel(given._replace(segments=_Runs(segments)))),
    )
    assert _ok(check.rows()) == {BROKEN}


def test_a_fused_layer_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt()).bfloat16().to(x.dtype) * weight

    checks = {check.name: check for check in fused.checks(SMALL)}
    assert {ok for check in checks.values() for ok in _ok(check.rows())} == {HELD}
    monkeypatch.setattr(fused.rms_norms, "rms_norm", rounded)
    assert _ok(checks["norm in float32"].rows()) == {BROKEN}


class _Runs:
    def __init__(self, runs: tuple[tuple[int, int], ...]) -> None:
        self.runs = runs


def test_a_bound_holds_up_to_itself_and_never_for_nan() -> None:
    assert rows.at_most("x", 1.0, 1.0).ok == rows.at_least("x", 1.0, 1.0).ok == HELD
    assert rows.at_most("x", 1.1, 1.0).ok == rows.at_least("x", 0.9, 1.0).ok == BROKEN
    for row in (rows.at_most("x", float("nan"), 1.0), rows.at_least("x", float("nan"), 1.0)):
        assert row.ok == BROKEN
    assert (
        rows.measured("x", float("inf")).ok == rows.measured_together("x", {"s": float("nan")}).ok == BROKEN
    )


def test_the_idle_share_is_what_no_kernel_covers() -> None:
    ran = [
        Interval("a", 0.0, 4.0),
        Interval("b", 1.0, 2.0),
        Interval("a", 6.0, 8.0),
        Interval("b", 8.0, 10.0),
    ]
    assert kernels.idle_share(ran[::-1]) == pytest.approx(0.2)
    assert kernels.longest(ran, 1) == [("a", pytest.approx(0.006))]
