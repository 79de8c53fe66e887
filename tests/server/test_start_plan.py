"""A start on GPUs that this machine need not have."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from skyrl_tinker import config
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.memory_costs import MemoryCosts, RowMemory
from skyrl_tinker.domain.units import GB
from skyrl_tinker.errors import StartupError
from skyrl_tinker.server import start_plan
from skyrl_tinker.server.memory_estimate import HOST, SAMPLER, Demand
from skyrl_tinker.server.start_plan import CostsProcess, Gpus
from tests.support.model_configs import QWEN3_8B, SMALL


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return tmp_path


def _costs(content: Mapping[str, Any], demand: Demand, ranks: int) -> MemoryCosts:
    """Measured ones of Qwen3-8B, rounded, without the seconds that it takes."""
    assert content == QWEN3_8B
    trained = 2_800_000 * demand.rank
    rows = (RowMemory(GB, per_token, 32768) for per_token in (6_800_000, 540_000, 180_000))
    return MemoryCosts(8_190_735_360, trained, 2 * 8_190_735_360 // ranks, 16 * trained, *rows, layers=36)


def _no_costs(*_: Any) -> MemoryCosts:
    raise AssertionError("no plan")


def _place(model: Path, gpus: int, size: float = 80, **given: Any) -> tuple[Settings, str]:
    told: list[str] = []
    settings = config.load(device="cuda", base_model=str(model), **given)
    placed = start_plan.place(settings, told.append, lambda: Gpus(gpus, size * GB), _costs)
    return placed, "\n".join(told)


def test_base_models_of_one_shape_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = _costs(QWEN3_8B, demand := Demand(1, 80 * GB, 4096, 32, 1, 0, 1, 0.9), 1)
    monkeypatch.setattr(CostsProcess, "_measure", measure := Mock(return_value=json.dumps(asdict(costs))))
    for shape in ("one", "one", "another"):
        with CostsProcess() as measuring:
            assert measuring.costs({"shape": shape}, demand, 1) == costs
    assert measure.call_count == 2


def test_one_process_measures_all_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes torch, which takes as long as to measure."""
    started: list[subprocess.Popen[str]] = []

    class Started(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(start_plan.subprocess, "Popen", Started)
    monkeypatch.setattr(start_plan, "_MEASURED", known := {})
    demand = Demand(1, 80 * GB, 4096, 8, 1, 0, 1, 0.9)
    with CostsProcess() as measuring:
        costs = [measuring.costs(SMALL, demand, ranks) for ranks in (1, 2, 1)]
    assert costs[0] == costs[2] != costs[1]
    (process,) = started
    assert process.poll() is not None
    known.clear()
    with CostsProcess() as measuring:
        assert measuring.costs(SMALL, demand, 2) == costs[1], "as alone"
        with pytest.raises(StartupError, match=r"no plan .*: the trainer does not support logit_scale$"):
            measuring.costs(SMALL | {"logit_scale": 2.0}, demand, 1)


def test_one_gpu_is_shared_and_the_user_is_told_what_was_chosen_and_why(model: Path) -> None:
    placed, told = _place(model, 1)
    assert (placed.placement, placed.trainer_ranks, placed.replicas) == ("colocated", 1, 1)
    assert placed.token_budget == 4096  # rows that keep all activations beside the base
    assert 1 < placed.resident_models < 20
    assert told.startswith("planned for 1 GPU of 80 GB; `serve --no-plan` leaves it to you:\n")
    for line in ("--placement colocated", "--trainer-ranks 1", "--token-budget 4096", "--resident-models"):
        assert f"\n  {line}" in told
    assert "keep all activations" in told


def test_eight_gpus_are_all_used_by_default(model: Path) -> None:
    placed, _ = _place(model, 8)
    assert (placed.placement, placed.trainer_ranks) == ("separate", 4)
    assert placed.replicas * placed.tensor_parallel_size == 4


@pytest.mark.parametrize(
    "given",
    [
        {"trainer_ranks": 2},
        {"replicas": 1, "tensor_parallel_size": 2},
        {"placement": "colocated"},
        {"token_budget": 1000, "resident_models": 3},
        {"context_length": 8192, "max_lora_rank": 8},
    ],
)
def test_what_the_user_has_set_is_kept(model: Path, given: dict[str, Any]) -> None:
    placed, told = _place(model, 8, **given)
    for setting, value in given.items():
        assert getattr(placed, setting) == value
        assert any(f"--{setting.replace('_', '-')} {value} " in line for line in told.splitlines())
    assert told.count("as given") == len(given)
    colocated = placed.placement == "colocated"
    assert placed.trainer_ranks + (0 if colocated else placed.replicas * placed.tensor_parallel_size) == 8


def test_gpus_by_arguments_of_vllm_are_counted(model: Path) -> None:
    placed, _ = _place(model, 8, vllm_args={"data-parallel-size": 2})
    assert (placed.trainer_ranks, placed.replicas) == (4, 2)


@pytest.mark.parametrize(
    ("size", "given", "names"),
    [
        (
            20,
            {},
            (
                "does not fit on 1 GPU of 20 GB: a row of 4096 tokens",
                "(GPU of a trainer rank, GB: weights of the frozen base 16.4, ",
                "row of 4096 tokens, 36 of 36 layers recomputed 3.2, ",
                "no row does; expected a smaller max_lora_rank or more or larger GPUs (",
            ),
        ),
        (
            80,
            {"gpu_memory_utilization": 0.2},
            (
                "the samplers have room for 0 tokens, not for a sequence of 4096",
                "(GPU of a sampler, GB: weights 16.4, slots of 8 adapters 2.9, ",
                "set a larger tensor_parallel_size or gpu_memory_utilization",
            ),
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sizes_and_what_to_change(
    model: Path, size: float, given: dict[str, Any], names: tuple[str, ...]
) -> None:
    with pytest.raises(StartupError) as refused:
        _place(model, 1, size, **given)
    for text in (*names, "or --no-plan (the setting plan) to start all the same"):
        assert text in str(refused.value)


@pytest.mark.parametrize(
    ("gpus", "setting", "placement"),
    [
        (2, {}, "separate"),
        (1, {}, "colocated"),
        (8, {"trainer_ranks": 4, "replicas": 2, "tensor_parallel_size": 2}, "separate"),
        (4, {"trainer_ranks": 4, "replicas": 2, "tensor_parallel_size": 2}, "colocated"),
        (2, {"trainer_ranks": 2, "vllm_args": {"data-parallel-size": 2}}, "colocated"),
        (8, {"placement": "colocated"}, "colocated"),
        (1, {"placement": "separate"}, "separate"),
    ],
)
def test_without_a_plan_gpus_that_are_too_few_for_both_are_shared(
    gpus: int, setting: dict[str, Any], placement: str
) -> None:
    settings = config.load(device="cuda", plan=False, **setting)
    placed = start_plan.place(settings, print, lambda: Gpus(gpus, GB), _no_costs)
    assert placed == settings.model_copy(update={"placement": placement})


def test_without_a_plan_gpus_that_are_too_few_for_either_are_refused() -> None:
    settings = config.load(device="cuda", plan=False, trainer_ranks=3, replicas=2)
    with pytest.raises(StartupError, match=r"needs 5 GPUs \(3 .*, 2 for samplers\), found 3$"):
        start_plan.place(settings, print, lambda: Gpus(3, GB), _no_costs)


def test_samplers_of_further_base_models_have_gpus_of_their_own(model: Path) -> None:
    (other := model / "teacher").mkdir()
    (other / "config.json").write_text(json.dumps(QWEN3_8B))
    own: dict[str, Any] = {"roles": ["sample"], "replicas": 2, "tensor_parallel_size": 2}
    placed, told = _place(model, 8, bases={str(other): own})
    assert (placed.trainer_ranks, placed.replicas * placed.tensor_parallel_size) == (2, 2)
    assert told.startswith(f"{other} is sampled on 4 GPUs of 80 GB\nplanned for 4 GPUs of 80 GB")
    assert placed.for_base(str(other)).replicas == 2
    with pytest.raises(StartupError, match=rf"^bases\.{other}: .* take 4 GPUs, found 4 in all"):
        _place(model, 4, bases={str(other): own})
    with pytest.raises(StartupError) as refused:
        _place(model, 8, 16, bases=[str(other)])
    assert str(refused.value).startswith(f"bases.{other}: --also {other} does not fit on 1 GPU of 16 GB: ")
    assert f'; its own settings stand in a table [bases."{other}"] of' in str(refused.value)
    with pytest.raises(StartupError) as refused:
        _place(model, 8, 16, max_lora_rank=0, bases=[str(other)])
    assert "gpu_memory_utilization, or a smaller context_length (GPU of a sampler," in str(refused.value)
    settings = config.load(device="cuda", plan=False, bases=[str(other)])
    assert start_plan.place(settings, print, lambda: Gpus(3, GB), _no_costs).placement == "separate"
    assert start_plan.place(settings, print, lambda: Gpus(2, GB), _no_costs).placement == "colocated"


def test_further_base_models_are_planned_beside_samplers_elsewhere(model: Path) -> None:
    (other := model / "other").mkdir()
    (other / "config.json").write_text(json.dumps(QWEN3_8B))
    own: dict[str, Any] = {"roles": ["train", "sample"]}
    placed, told = _place(model, 3, sampler_urls=["http://a:9"], bases={str(other): own})
    assert f"planned {other} for 2 GPUs of 80 GB" in told
    assert placed.bases[str(other)].token_budget > 0
    assert placed.placement == "separate"
    assert "planned for" not in told, "its samplers are elsewhere"
    with pytest.raises(StartupError, match=rf"^bases\.{other}: .* take 2 GPUs, found 2 in all"):
        _place(model, 2, sampler_urls=["http://a:9"], bases={str(other): own})


def test_trained_base_models_are_planned_each_on_its_own_gpus(model: Path) -> None:
    (other := model / "other").mkdir()
    (other / "config.json").write_text(json.dumps(QWEN3_8B))
    own: dict[str, Any] = {"roles": ["train", "sample"], "trainer_ranks": 2, "replicas": 1}
    placed, told = _place(model, 6, trainer_ranks=1, replicas=2, bases={str(other): own})
    assert f"planned {other} for 3 GPUs of 80 GB" in told
    reasons = dict(re.findall(r"\n  --([a-z-]+) .*?  ([a-z].*)", told.partition("\nplanned for")[0]))
    given = {name for name, reason in reasons.items() if reason == "as given"}
    default = {name for name, reason in reasons.items() if reason == "by default"}
    assert given == {"trainer-ranks", "replicas"}
    assert default == {"placement", "tensor-parallel-size"}
    further = placed.for_base(str(other))
    assert (further.trainer_ranks, further.replicas, placed.trainer_ranks, placed.replicas) == (2, 1, 1, 2)
    assert further.token_budget > 0
    assert placed.bases[str(other)].token_budget == further.token_budget
    with pytest.raises(StartupError, match=rf"^bases\.{other}: trainer_ranks and .* take 3 GPUs, found 3 in"):
        _place(model, 3, trainer_ranks=1, replicas=1, bases={str(other): own})


def test_of_base_models_on_demand_the_largest_has_gpus(model: Path) -> None:
    others = []
    for name in ("a", "b"):
        (other := model / name).mkdir()
        (other / "config.json").write_text(json.dumps(QWEN3_8B))
        others.append(str(other))
    large: dict[str, Any] = {"roles": ["train", "sample"], "trainer_ranks": 2, "start": "on_demand"}
    small: dict[str, Any] = {"start": "on_demand"}
    placed, told = _place(model, 5, trainer_ranks=1, replicas=1, bases={others[0]: large, others[1]: small})
    assert (placed.trainer_ranks, placed.replicas) == (1, 1)
    assert f"planned {others[0]}, on demand, for 3 GPUs of 80 GB" in told
    assert f"{others[1]}, on demand, is sampled on 1 GPU of 80 GB" in told
    assert "base models on demand share 3 GPUs: one that is idle stops for another" in told
    with pytest.raises(StartupError, match=rf"^bases\.{others[1]}: .* take 1 GPUs, found 4 in all"):
        _place(model, 4, trainer_ranks=1, bases={others[0]: large, others[1]: {}})


def test_a_base_model_that_is_only_sampled_has_no_memory_of_training(model: Path) -> None:
    (other := model / "teacher").mkdir()
    (other / "config.json").write_text(json.dumps(QWEN3_8B))
    for rank, share in ((8, 0.85), (0, 0.96)):  # which leaves no room for new weights
        settings = config.load(
            device="cuda",
            base_model=str(model),
            bases=[str(other)],
            max_lora_rank=rank,
            gpu_memory_utilization=share,
        )
        _, left, (planned,) = start_plan.beside_further(settings, Gpus(3, 80 * GB), _costs, print)
        assert (left.count, planned.gpus, planned.on_demand) == (2, 1, False)
        sizes = {line.name: line.bytes for line in planned.lines if line.place == HOST}
        adapters = {"32 adapters in each process of the samplers, at most": 32 * 2 * 2_800_000 * rank}
        assert sizes == {"the base's file, mapped, for all ranks together": 2 * 8_190_735_360} | (
            adapters if rank else {}
        )
        assert {line.place for line in planned.lines} == {HOST, SAMPLER}


def test_float32_is_not_planned_as_bfloat16(model: Path) -> None:
    with pytest.raises(StartupError, match=r"^--trainer-dtype float32: .*serve --no-plan"):
        _place(model, 1, replicas=0, trainer_dtype="float32")
    assert _place(model, 1, replicas=0, trainer_dtype="float32", plan=False)[0].trainer_dtype == "float32"


def test_a_server_without_samplers_trains_on_all_gpus(model: Path) -> None:
    (other := model / "other").mkdir()
    (other / "config.json").write_text(json.dumps(QWEN3_8B))
    placed, told = _place(model, 2, replicas=0)
    assert (placed.placement, placed.trainer_ranks, placed.replicas) == ("separate", 2, 0)
    assert "--replicas 0" in told
    assert "sampler" not in told
    own: dict[str, Any] = {"roles": ["train"], "trainer_ranks": 1}
    placed, told = _place(model, 3, trainer_ranks=2, replicas=0, bases={str(other): own})
    assert f"planned {other} for 1 GPU of 80 GB" in told
    assert (placed.trainer_ranks, placed.for_base(str(other)).replicas) == (2, 0)
    found = start_plan.plan(
        config.load(device="cuda", base_model=str(model), replicas=0), Gpus(1, 80 * GB), _costs
    )
    assert found.problem is None
    assert not [line for line in found.lines if "sampler" in line.place]


@pytest.mark.parametrize("given", [{}, {"device": "cuda", "sampler_urls": ["http://a:9"]}])
def test_without_gpus_or_samplers_of_our_own_nothing_is_planned(given: dict[str, Any]) -> None:
    settings = config.load(**given)
    placed = start_plan.place(settings, print, lambda: pytest.fail("no GPU is looked for"), _no_costs)
    assert placed == settings.model_copy(update={"placement": "separate"})


def test_gpus_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert start_plan.probe_gpus() == Gpus(0, 0)


def test_the_supervisor_imports_no_torch() -> None:
    code = "import sys, skyrl_tinker.server.supervisor; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
