"""`skyrl-tinker plan` from config.json alone."""

import json
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from skyrl_tinker import config
from skyrl_tinker.cli.commands import app
from skyrl_tinker.cli.plan_output import as_json, as_table, serve_line
from skyrl_tinker.server import preflight
from skyrl_tinker.server.capacity_plan import CapacityPlan
from skyrl_tinker.server.memory_estimate import HOST, MemoryLine
from skyrl_tinker.server.start_plan import FurtherPlan
from tests.support.model_configs import QWEN3_8B, SMALL


def _plan(directory: Path, own: dict[str, Any], *options: str) -> Result:
    """Plan in this process, which counts each row once."""
    (directory / "config.json").write_text(json.dumps(own))
    return CliRunner().invoke(app, ["plan", "--base-model", str(directory), *options])


def _lines(plan: dict[str, Any], place: str) -> dict[str, float]:
    return {line["name"]: line["bytes"] for line in plan["lines"] if line["place"] == place}


def test_an_8b_trains_32k_tokens_on_one_gpu_with_recomputed_layers(tmp_path: Path) -> None:
    result = _plan(
        tmp_path,
        QWEN3_8B,
        *["--context-length", "32768", "--max-lora-rank", "32", "--tenants", "8", "--json"],
    )
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    chosen = {choice["setting"]: choice["value"] for choice in plan["choices"]}
    assert plan["fits"]
    assert chosen["token_budget"] == 8192
    trainer = _lines(plan, "GPU of a trainer rank")
    assert trainer["weights of the frozen base"] == pytest.approx(2 * 8_190_735_360, rel=1e-6)
    kept = trainer["row of 32768 tokens, all activations kept"]
    recomputed = trainer["row of 32768 tokens, 36 of 36 layers recomputed"]
    assert recomputed < 25e9 < 150e9 < kept
    (some,) = trainer.keys() & {
        f"row of 32768 tokens, {again} of 36 layers recomputed" for again in range(1, 36)
    }
    assert recomputed < trainer[some] < kept
    assert plan["longest"] == 32768
    assert (chosen["placement"], plan["weights_by"]) == ("colocated", "cuda ipc")


def test_the_table_names_places_settings_and_reasons_and_keeps_what_is_given(tmp_path: Path) -> None:
    given = ("--trainer-ranks 1", "--token-budget 3000", "--resident-models 5")
    result = _plan(tmp_path, SMALL, "--gpus", "4", "--context-length", "4096", *" ".join(given).split())
    assert result.exit_code == 0, result.stderr
    for text in ("GPU of a trainer rank, GB", "host memory, GB", "shared memory, GB", "disk, GB"):
        assert f"\n{text}\n" in result.stdout
    for setting in given:
        assert re.search(rf"\n  {setting} +as given\n", result.stdout)
    assert re.search(r"\n  --placement separate .*\n(.*\n)+  --replicas 3 ", result.stdout)
    assert "\n  full parameters by nccl, adapters by shared memory\n" in result.stdout
    served = f"--base-model {tmp_path} --device cuda {' '.join(given)} --context-length 4096"
    fits, command = result.stdout.splitlines()[-2:]
    assert fits == "fits:"
    assert set(command.split()) == {"skyrl-tinker", "serve", *served.split()}


def test_a_plan_has_the_defaults_of_the_server(tmp_path: Path) -> None:
    result = _plan(tmp_path, SMALL, "--json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert "row of 4096 tokens, all activations kept" in _lines(plan, "GPU of a trainer rank")
    assert plan["serve"] == f"skyrl-tinker serve --base-model {tmp_path} --device cuda"
    assert plan["bases"] == {}


def test_further_base_models_are_planned_beside_the_first(tmp_path: Path) -> None:
    (teacher := tmp_path / "teacher").mkdir()
    (teacher / "config.json").write_text(json.dumps(SMALL))
    also = "--also", str(teacher)
    result = _plan(tmp_path, SMALL, "--gpus", "3", *also)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{teacher} is sampled on 1 GPU of 80 GB\n")
    assert re.search(r"\n  --placement separate .*\n  --trainer-ranks 1 ", result.stdout)
    served = f"--base-model {tmp_path} --also {teacher} --device cuda"
    assert result.stdout.splitlines()[-1] == f"  skyrl-tinker serve {served}"
    refused = _plan(tmp_path, SMALL, "--gpus", "1", *also)
    assert refused.exit_code == 1
    assert f"bases.{teacher}: replicas x tensor_parallel_size take 1 GPUs" in refused.stderr


def _bases(shown: str) -> dict[str, list[str]]:
    """Return the numbers of the table of base models, by the name of its directory."""
    table = shown.partition("\nbase models, GB")[2].partition("\n\n")[0]
    rows = [re.split(r"  +", line.strip()) for line in table.splitlines()[1:]]
    return {name.rpartition("/")[2]: numbers for name, *numbers in rows if numbers}


def test_the_memory_of_all_base_models_is_told_with_what_runs_at_once(tmp_path: Path) -> None:
    for name in ("teacher", "large", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SMALL))
    teacher, large, small = (str(tmp_path / name) for name in ("teacher", "large", "small"))
    also = "--also", teacher, "--also", f"{large}:train,sample,on_demand", "--also", f"{small}:on_demand"
    result = _plan(tmp_path, SMALL, "--gpus", "5", *also)
    assert result.exit_code == 0, result.stderr
    rows = _bases(result.stdout)
    assert {name: numbers[0] for name, numbers in rows.items()} == {
        tmp_path.name: "2",
        "teacher": "1",
        "large, on demand": "2",
        "small, on demand": "1",
        "at once, at most": "5",
    }
    assert rows["teacher"][1] == "-", "no trainer"
    first = re.search(r"\nhost memory, GB\n(.*\n)*?  together +(\S+)\n", result.stdout)
    host = {name: float(numbers[-1]) for name, numbers in rows.items()}
    assert first is not None
    assert float(first[2]) == host[tmp_path.name]
    assert f"\n  always beside each other: {tmp_path}, {teacher}\n" in result.stdout
    assert f"\n  of those on demand at once, on 2 GPUs: {large}; or {small}\n" in result.stdout
    result = _plan(tmp_path, SMALL, "--gpus", "5", *also, "--json")
    plan = json.loads(result.stdout)
    assert {each["name"]: each["gpus"] for each in plan["further"]} == {teacher: 1, large: 2, small: 1}
    at_once = [sum(_lines(each, "host memory").values()) for each in (plan, *plan["further"][:2])]
    assert plan["host_bytes"] == pytest.approx(sum(at_once))
    assert plan["host_bytes"] / 1e9 == pytest.approx(host["at once, at most"], abs=0.01)


def _on_demand(needs: Sequence[tuple[int, float]]) -> tuple[str, float]:
    """What runs at once, and its host memory, of base models on demand that need so many GPUs and bytes."""
    further = [
        FurtherPlan(f"b{number}", on_demand=True, gpus=gpus, lines=(MemoryLine(HOST, "all", size),))
        for number, (gpus, size) in enumerate(needs)
    ]
    placed, found = config.load(base_model="first"), CapacityPlan(None, None, (), (), 1, 0.0, "nccl")
    table = as_table(found, placed, further, 1, "serve")
    told = re.search(r"\n  of those on demand at once, on (.*)\n", table)
    assert told is not None
    return told[1], json.loads(as_json(found, placed, further, 1, "serve"))["host_bytes"]


def test_what_runs_at_once_is_listed_of_few_base_models_on_demand_and_of_many_as_a_rule() -> None:
    few = "2 GPUs: b1, b2; or b1, b3; or b2, b3; or b0"
    assert _on_demand([(2, 5.0), (1, 4.0), (1, 2.0), (1, 3.0)]) == (few, 7.0)
    many = [(1 + number % 4, 1.0 + number) for number in range(40)]  # 10^12 sets
    assert _on_demand(many) == ("4 GPUs: any that need no more together", 37.0 + 33.0 + 29.0 + 25.0)


@pytest.mark.parametrize("full", [True, False])
def test_adapters_reach_samplers_where_there_are_any(tmp_path: Path, full: bool) -> None:
    result = _plan(tmp_path, SMALL, "--gpus", "2", *["--full"] * full)
    assert result.exit_code == 0, result.stderr
    ways = result.stdout.partition("\nto the samplers\n  ")[2].partition("\n")[0]
    assert ways == "full parameters by nccl" + ("" if full else ", adapters by shared memory")


def test_its_command_says_which_base_models_start_on_demand() -> None:
    given = {"base_model": "A", "replicas": None, "bases": ["B:train,on_demand", "C"]}
    assert serve_line(None, given) == "skyrl-tinker serve --base-model A --also B:train,on_demand --also C"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Directories of two base models."""
    for name in ("student one", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SMALL))
    return tmp_path / "student one", tmp_path / "teacher"


def _started(line: str, monkeypatch: pytest.MonkeyPatch) -> config.Settings:
    """Return the settings that a printed command starts a server with, in a shell without variables."""
    words = shlex.split(line)
    variables, command = words[: words.index("skyrl-tinker")], words[words.index("skyrl-tinker") + 1 :]
    for name in config.variables().values():
        monkeypatch.delenv(name)
    for name, _, value in (each.partition("=") for each in variables):
        monkeypatch.setenv(name, value)
    shown = CliRunner().invoke(app, [*command, "--show-config"])
    assert shown.exit_code == 0, shown.output
    settings = config.Settings.model_validate(tomllib.loads(shown.stdout))
    preflight.check_settings(settings)
    return settings


def test_the_tables_of_a_file_are_planned_and_its_command_names_the_file(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = pair
    (file := tmp_path / "my server.toml").write_text(
        f'base_model = "{student}"\nport = 9\nplan = false\ncontext_length = 64\n'
        f'[bases."{teacher}"]\ntensor_parallel_size = 2\n'
    )
    options = ["--config", str(file), "--gpus", "4", "--context-length", "4096"]
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{teacher} is sampled on 2 GPUs of 80 GB\n")
    line = result.stdout.splitlines()[-1].strip()
    options = "--context-length 4096 --device cuda --plan"
    assert line == f"skyrl-tinker serve --config {shlex.quote(str(file))} {options}"
    settings = _started(line, monkeypatch)
    assert (settings.base_model, settings.port, settings.context_length) == (str(student), 9, 4096)
    assert (settings.device, settings.plan) == ("cuda", True)
    assert settings.bases[str(teacher)].tensor_parallel_size == 2


def test_the_tables_of_the_environment_are_in_its_command(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = pair
    monkeypatch.setenv("SKYRL_TINKER_BASES", json.dumps({str(teacher): {"tensor_parallel_size": 2}}))
    monkeypatch.setenv("SKYRL_TINKER_TIMEOUTS", '{"base_idle_s": 5}')
    monkeypatch.setenv("SKYRL_TINKER_DATABASE_URL", "postgresql+psycopg://me:secret@host/name")
    also = ["--also", f"{teacher}:train,sample"]
    result = CliRunner().invoke(app, ["plan", "--base-model", str(student), "--gpus", "5", *also, "--json"])
    assert result.exit_code == 0, result.output
    assert "secret" not in result.stdout
    settings = _started(json.loads(result.stdout)["serve"], monkeypatch)
    assert settings.base_model == str(student)
    assert settings.timeouts.base_idle_s == 5
    own = settings.bases[str(teacher)]
    assert (own.roles, own.tensor_parallel_size) == (("train", "sample"), 2)


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        ("port = 9\n", "base_model: found none, expected --base-model, or one in the file of --config"),
        ("base_model = 'a'\nsampler_urls = ['http://a:9']\n", "sampler_urls: found one, with which `serve` "),
        ("base_model = 'a'\nray_address = 'a:9'\n", "ray_address: found one, with which `serve` plans"),
    ],
)
def test_a_file_with_which_no_server_is_planned_is_refused(
    tmp_path: Path, content: str, refusal: str
) -> None:
    (file := tmp_path / "server.toml").write_text(content)
    result = CliRunner().invoke(app, ["plan", "--config", str(file)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"skyrl-tinker: {refusal}")


def test_what_does_not_fit_ends_with_an_error(tmp_path: Path) -> None:
    result = _plan(tmp_path, SMALL, "--full", "--gpu-memory", "3.2", "--context-length", "32768")
    assert result.exit_code == 1
    assert "does not fit: " in result.stdout
    assert re.search(r"\n  --max-lora-rank 0 +as given\n", result.stdout)


def test_a_model_that_the_trainer_refuses_is_refused_with_its_words(tmp_path: Path) -> None:
    result = _plan(tmp_path, SMALL | {"logit_scale": 2.0}, "--context-length", "4096")
    assert result.exit_code == 1
    counted, refused = result.stderr.splitlines()
    assert counted.startswith("skyrl-tinker: counting the memory of a row of 4096 tokens on 1 trainer rank")
    assert re.fullmatch("skyrl-tinker: no plan .*: the trainer does not support logit_scale", refused)


def test_a_context_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    result = _plan(tmp_path, SMALL, "--context-length", "100000")
    assert result.exit_code == 1
    assert result.stderr.startswith("skyrl-tinker: context_length is 100000")
    assert len(result.stderr.splitlines()) == 1
