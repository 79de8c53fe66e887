import json
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import ValidationError

from skyrl_tinker import config
from skyrl_tinker.config import BaseOverrides, Settings
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.session import SdkFlags
from skyrl_tinker.protocol.validation.key_limits import KeyLimits


def test_arguments_beat_the_environment_which_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('port = 1\nhost = "file"\nbase_model = "file"\n')
    monkeypatch.setenv("SKYRL_TINKER_PORT", "2")
    monkeypatch.setenv("SKYRL_TINKER_HOST", "environment")
    settings = config.load(file, port=3)
    assert (settings.port, settings.host, settings.base_model) == (3, "environment", "file")


def test_the_device_changes_defaults_from_any_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (config.load().trainer_dtype, config.load().token_budget) == ("float32", 2048)
    file = tmp_path / "settings.toml"
    file.write_text('device = "cuda"\ntoken_budget = 4096\n')
    settings = config.load(file)
    assert (settings.trainer_dtype, settings.token_budget) == ("bfloat16", 4096)
    monkeypatch.setenv("SKYRL_TINKER_DEVICE", "cuda")
    assert config.load().token_budget == 16384
    assert config.load(trainer_dtype="float32").trainer_dtype == "float32"


def test_what_is_given_is_told_from_defaults_whatever_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "settings.toml").write_text("replicas = 1\n")
    monkeypatch.setenv("SKYRL_TINKER_TRAINER_RANKS", "1")
    given = config.load(file, device="cuda", context_length=None).model_fields_set
    assert given == {"replicas", "trainer_ranks", "device"}


def test_arguments_of_vllm_are_given_one_by_one_as_a_table_or_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        '[vllm_args]\nquantization = "fp8"\n"compilation-config" = {mode = 3}\nenforce-eager = true\n'
    )
    table = {"quantization": "fp8", "compilation-config": {"mode": 3}, "enforce-eager": True}
    assert config.load(file).vllm_args == table
    given = ["quantization=fp8", 'compilation-config={"mode": 3}', "enforce-eager"]
    assert config.load(vllm_args=given).vllm_args == table
    monkeypatch.setenv("SKYRL_TINKER_VLLM_ARGS", json.dumps(table))
    assert config.load().vllm_args == table


def test_each_key_of_a_table_counts_by_its_strongest_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[keys]\nmodels = 1\nsessions = 1\nbacklog = 1\n[sdk]\nproto_compress_fwdbwd = true\n")
    monkeypatch.setenv("SKYRL_TINKER_KEYS", '{"models": 2, "sessions": 2}')
    settings = config.load(file, keys=["models=3"], sdk=["sample_use_retrieve_futures"])
    assert settings.keys == KeyLimits(models=3, sessions=2, backlog=1)
    assert settings.sdk == SdkFlags(proto_compress_fwdbwd=True, sample_use_retrieve_futures=True)
    assert settings.model_fields_set == {"keys", "sdk"}
    assert settings.keys.model_fields_set == {"models", "sessions", "backlog"}


@pytest.mark.parametrize("given", ["models=-1", "models=three", "models", "model=3", "metadata_kb=-0.5"])
def test_a_wrong_key_of_a_table_is_refused_by_its_full_name(given: str) -> None:
    with pytest.raises(ValidationError, match=rf"keys\.{given.partition('=')[0]}\n"):
        config.load(keys=[given])


def test_there_are_few_settings() -> None:
    assert len(Settings.model_fields) <= 65


def test_none_counts_as_not_given() -> None:
    assert config.load(port=None).port == 8000


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, field in Settings.model_fields.items()
        if {str, Path} & {field.annotation, *get_args(field.annotation)}
        and name not in ("vllm_args", "bases")
    ],
)
def test_an_empty_text_is_refused_from_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    several = get_origin(Settings.model_fields[name].annotation) is tuple
    value = [""] if several else ""
    (file := tmp_path / "settings.toml").write_text(f"{name} = {json.dumps(value)}\n")
    with pytest.raises(ValidationError, match=rf"{name}\n"):
        config.load(file)
    monkeypatch.setenv(f"SKYRL_TINKER_{name.upper()}", json.dumps(value) if several else "")
    with pytest.raises(ValidationError, match=rf"{name}\n"):
        config.load()


@pytest.mark.parametrize("given", [[""], {"": {"roles": ["sample"]}}])
def test_a_further_base_model_without_a_name_is_refused(given: object) -> None:
    with pytest.raises(ValidationError, match=r"\nbases\n.*found an empty name"):
        config.load(bases=given)


@pytest.mark.parametrize("name", ["home", "host", "checkpoints"])
def test_a_text_with_nul_is_refused(tmp_path: Path, name: str) -> None:
    (file := tmp_path / "settings.toml").write_text(f'{name} = "a\\u0000b"\n')
    with pytest.raises(ValidationError, match=rf"{name}\n.*expected a text without NUL"):
        config.load(file)


def test_unknown_keys_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ValidationError, match="prot"):
        config.load(file)


def test_misspelt_variables_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_TINKER_PROT", "1")
    monkeypatch.setenv("SKYRL_TINKER_TORCH_INDEX", "read by scripts/setup")
    with pytest.raises(ValidationError, match="prot"):
        config.load()
    monkeypatch.delenv("SKYRL_TINKER_PROT")
    config.load()


def test_children_read_back_the_same_settings(tmp_path: Path) -> None:
    arguments = {"seed": 7, "enforce-eager": False, "kv-offloading-size": 1.5, "hf-overrides": {"a": [1]}}
    limits = KeyLimits(models=3)
    settings = config.load(home=tmp_path, port=1234, context_length=128, vllm_args=arguments, keys=limits)
    (file := tmp_path / "settings.json").write_text(settings.model_dump_json())
    assert config.read_back(file) == settings


def test_a_further_base_model_has_the_server_s_settings_and_keys_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        'base_model = "student"\nreplicas = 2\nmax_loras = 3\ncontext_length = 64\nplacement = "colocated"\n'
        'vllm_args = {seed = 1}\nrouter_replay = true\nsampled_logprobs = "processed"\n'
        '[bases."org/teacher"]\nroles = ["sample"]\nmodel_name = "teacher"\nmax_lora_rank = 0\n'
        '[bases."org/teacher".vllm_args]\nmax-num-seqs = 4\n'
    )
    monkeypatch.setenv("SKYRL_TINKER_BASES", '{"org/teacher": {"context_length": 128}}')
    settings = config.load(file, bases=["grader"])
    assert settings.for_base("student") is settings
    teacher = settings.for_base("teacher")
    assert teacher == settings.for_base("org/teacher")
    assert (teacher.base_model, teacher.model_name) == ("org/teacher", "teacher")
    assert (teacher.context_length, teacher.max_lora_rank, teacher.vllm_args) == (128, 0, {"max-num-seqs": 4})
    grader = settings.for_base("grader")
    assert (grader.model_name, grader.context_length, grader.replicas, grader.vllm_args) == (
        None,
        None,
        1,
        {},
    )
    assert (grader.max_loras, grader.sampled_logprobs, grader.home) == (3, "processed", settings.home)
    assert (grader.bases, grader.placement, grader.router_replay) == ({}, "separate", False)
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_a_base_model_may_have_a_sampling_engine_of_its_own() -> None:
    engines = {"A": {}, "B": {"sampler_engine": "vllm"}, "C": {"sampler_python": "own/python"}}
    settings = config.load(sampler_engine="sglang", sampler_python="/env/python", bases=engines)
    found = {name: settings.for_base(name) for name in engines}
    assert {name: each.sampler_engine for name, each in found.items()} == {
        "A": "sglang",
        "B": "vllm",
        "C": "sglang",
    }
    assert [str(found[name].sampler_python) for name in "AC"] == [
        "/env/python",
        str(Path.cwd() / "own/python"),
    ]
    assert settings.sampler_engine == "sglang"


def test_a_further_base_model_starts_on_demand_where_it_says_so() -> None:
    own = {"B": {"start": "on_demand", "model_name": "b"}, "C": {"start": "always"}, "D": {}}
    settings = config.load(base_model="A", timeouts={"base_idle_s": 60}, bases=own)
    assert [settings.idle_s_of(name) for name in ("A", "B", "b", "C", "D")] == [None, 60.0, 60.0, None, None]
    assert not hasattr(settings.for_base("b"), "start")
    assert config.load(bases=own).idle_s_of("B") == 1800.0


def test_a_further_base_model_is_trained_where_its_roles_say_so(tmp_path: Path) -> None:
    directory = tmp_path / "a:b"
    directory.mkdir()
    names = ["org/teacher", "org/other:train,sample", str(directory), "/m:1/c", "c:sample"]
    settings = config.load(trainer_ranks=2, token_budget=100, bases=names)
    assert {name: own.trains for name, own in settings.bases.items()} == {
        "org/teacher": False,
        "org/other": True,
        str(directory): False,
        "/m:1/c": False,
        "c": False,
    }
    (other,) = settings.further_trained
    assert (other.base_model, other.trainer_ranks, other.token_budget) == ("org/other", 1, 100)
    assert settings.all_trainer_ranks == 3
    assert not config.load(bases={"B": {}}).bases["B"].trains


@pytest.mark.parametrize(
    ("given", "roles"),
    [
        ("B:on_demand", ("sample",)),
        ("B:train,sample,on_demand", ("train", "sample")),
        ("B:on_demand,train", ("train",)),
    ],
)
def test_also_says_that_a_base_model_starts_on_demand(given: str, roles: tuple[str, ...]) -> None:
    own = config.load(bases=[given, "C:sample"]).bases
    assert (own["B"].roles, own["B"].start, own["C"].start) == (roles, "on_demand", "always")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("B:train,smple", "smple"),
        ("B:on-demand", "on-demand"),
        ("B:4b", "4b"),
        ("a:b:grade,train", "grade"),
        ("B:train,", ""),
    ],
)
def test_unknown_uses_behind_a_name_are_refused(given: str, found: str) -> None:
    said = f"--also {given}: found '{found}' behind the name, expected train, sample or on_demand, "
    with pytest.raises(UserError, match=re.escape(said)):
        config.load(bases=[given])


def test_a_base_model_may_only_be_trained() -> None:
    settings = config.load(replicas=0, bases=["org/other:train", "org/teacher"])
    assert not settings.samples
    assert not settings.for_base("org/other").samples
    assert settings.for_base("org/teacher").samples
    assert settings.all_trainer_ranks == 2
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_keys_of_a_base_model_are_those_of_settings() -> None:
    for key, field in BaseOverrides.model_fields.items():
        if key not in ("roles", "start"):
            setting = Settings.model_fields[key]
            assert field.annotation in (setting.annotation, (setting.annotation or int) | None)  # type: ignore[operator]
            assert field.metadata == setting.metadata


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"B": {"roles": []}}, r"bases\.B\.roles\n.*expected \[\"train\", \"sample\"\], \[\"train\"\] or"),
        ({"B": {"replicas": 0}}, r"bases\.B\n.*found replicas = 0, expected at least 1, or roles"),
        (
            {"B": {"roles": ["train"], "replicas": 1}},
            r"bases\.B\n.*found replicas or sampler_urls, expected none",
        ),
        (
            {"B": {"roles": ["train"], "sampler_urls": ["http://a:9"]}},
            r"bases\.B\n.*found replicas or sampler",
        ),
        ({"B": {"roles": ["grade"]}}, r"bases\.B\.roles\.0\n"),
        ({"B": {"start": "never"}}, r"bases\.B\.start\n.*'always' or 'on_demand'"),
        ({"B": {"trainer_ranks": 0}}, r"bases\.B\.trainer_ranks\n"),
        ({"A": {"roles": ["sample"]}}, r"\nbases\n.*'A' names two base models"),
        ({"B": {"roles": ["sample"], "model_name": "mine"}}, r"\nbases\n.*'mine' names two base models"),
    ],
)
def test_wrong_base_models_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config.load(base_model="A", model_name="mine", bases=given)


def test_everything_lies_under_home_unless_said_otherwise(tmp_path: Path) -> None:
    settings = config.load(home=tmp_path)
    assert settings.store_url == f"sqlite:///{tmp_path}/skyrl-tinker.db"
    assert settings.checkpoint_root == tmp_path / "checkpoints"


@pytest.mark.parametrize(("processes", "share"), [(1, 10), (3, 4), (64, 1)])
def test_api_processes_have_a_share_of_a_limit(processes: int, share: int) -> None:
    assert Settings(api_processes=processes).api_share(10) == share


def test_no_test_or_script_sets_a_former_setting() -> None:
    """Those of the long tests would be refused at night only."""
    names = "|".join(config.FORMER)
    dashed = "|".join(name.replace("_", "-") for name in config.FORMER)
    variables = "|".join(name.upper() for name in config.FORMER)
    former = re.compile(rf"SKYRL_TINKER_({variables})\b|--({dashed})\b(?!-)|(\\n|[\"'])({names}) ?= ?\S")
    root = Path(__file__).parents[1]
    found = {
        str(file.relative_to(root)): match[0]
        for folder in ("tests", "scripts", "examples", "docker")
        for file in root.glob(f"{folder}/**/*")
        if file.is_file() and file.suffix in {"", ".py", ".toml", ".yaml", ".yml"}
        for match in former.finditer(file.read_text())
    }
    assert set(found) == {"tests/cli/test_commands.py", "tests/test_config.py"}, found
