"""Output of the command line: help, and errors of mistyped settings."""

import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from skyrl_tinker import __version__, config
from skyrl_tinker.cli.commands import app
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.database.opening import file_of
from tests.support.failures import files_up_to


def test_help_names_the_defaults() -> None:
    shown = " ".join(CliRunner().invoke(app, ["serve", "--help"]).stdout.split())
    for default in ("[default: 8000]", "[default: cpu]", "[default: the model's, at most 4096]"):
        assert default in shown


def test_help_has_sections_and_the_keys_of_tables() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"]).stdout
    titles = [line.removesuffix(":") for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == ["Options", *config.SECTIONS.values()]
    words = " ".join(shown.split())
    assert "--keys NAME=VALUE" in words
    assert "keys.models Models in training [default: any number]" in words
    assert "bodies.json_mb Largest other body, as sent and after decompression [default: 16]" in words


def test_every_option_of_serve_is_a_setting_with_its_description() -> None:
    options = {option.name: option for option in get_command(app).commands["serve"].params}
    assert options.keys() - {"config_file", "show_config", "full"} == config.Settings.model_fields.keys()
    for name, field in config.Settings.model_fields.items():
        assert (description := config.description_of(field))
        assert all(config.description_of(key) for key in config.keys_of(name).values())
        assert options[name].help.startswith(description)
        assert options[name].default is None


def test_sampler_urls_are_given_one_by_one() -> None:
    urls = ["--sampler-urls", "http://127.0.0.1:9", "--sampler-urls", "http://127.0.0.1:9/"]
    result = CliRunner().invoke(app, ["serve", *urls])
    assert "sampler_urls name a server twice: http://127.0.0.1:9, http://127.0.0.1:9/" in result.stderr


def test_arguments_of_vllm_are_given_one_by_one() -> None:
    result = CliRunner().invoke(app, ["serve", "--vllm-args", "seed=7", "--vllm-args", "port=9"])
    assert "vllm_args: port cannot be given: vLLM's port is set by skyrl-tinker" in result.stderr


def test_flags_of_the_trainer_reach_the_settings() -> None:
    flags = ["--gradient-checkpointing", "--token-budget", "0", "--trainer-dtype", "float16"]
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code == 1
    assert "trainer_dtype: Input should be 'float32' or 'bfloat16'" in result.stderr
    assert "token_budget: Input should be greater than or equal to 1" in result.stderr
    assert "gradient_checkpointing" not in result.stderr


def test_full_is_short_for_rank_0() -> None:
    for command in ("serve", "plan", "doctor"):
        shown = " ".join(CliRunner().invoke(app, [command, "--help"]).stdout.split())
        assert " --full Short for --max-lora-rank 0: full parameters only " in shown
        assert "0 (--full):" in shown
    result = CliRunner().invoke(app, ["serve", "--full", "--show-config"])
    assert "max_lora_rank = 0" in result.stdout.splitlines()
    for both in (["--full", "--max-lora-rank", "8"], ["--max-lora-rank=8", "--full"]):
        result = CliRunner().invoke(app, ["serve", *both, "--show-config"])
        assert (result.exit_code, result.stdout) == (1, "")
        assert "--full is short for --max-lora-rank 0" in result.stderr


def test_it_tells_its_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"skyrl-tinker {__version__}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"port = = 1\n", "--config: not a TOML file: Invalid value (at line 1, column 8)"),
        (b"\xff\xfe", "--config: not a TOML file: "),
        (b"a = " + b"[" * 5000, "--config: not a TOML file: maximum recursion depth"),
        (b"prot = 1\n", "settings: prot: there is no such setting, did you mean port?\n"),
        (b"fine_tuning = 1\n", "settings: fine_tuning: there is no such setting\n"),
        (b"unit_ms = 1\n", "settings: unit_ms: no setting any more\n"),
        (b"key_models = 1\n", "settings: key_models: now keys.models (--keys models=…, [keys] in a file)\n"),
        (
            b"[keys]\nmodel = 1\n",
            "settings: keys.model: there is no such setting, did you mean keys.models?\n",
        ),
        (
            b"[keys]\nmodels = -1\n",
            "settings: keys.models: Input should be greater than or equal to 0, found -1\n",
        ),
        (
            b'bases.tiny.roles = ["sample"]\n',
            "settings: bases: 'tiny' names two base models, expected different names, found {'tiny': ",
        ),
        (b"port = -1\n", "settings: port: Input should be greater than or equal to 0, found -1\n"),
    ],
)
def test_a_bad_config_file_ends_with_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(content)
    result = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"skyrl-tinker: {message}")
    assert len(result.stderr.splitlines()) == 1


def test_a_variable_that_is_no_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_TINKER_PROT", "1")
    told = CliRunner().invoke(app, ["serve"]).stderr
    assert "environment variable SKYRL_TINKER_PROT: there is no such setting, did you mean port?" in told


def test_a_name_that_was_a_setting_is_refused_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_line("serve", "--unit-ms=5") == "skyrl-tinker: settings: --unit-ms: no setting any more\n"
    assert "settings: bodies.datums: no setting any more" in one_line("serve", "--bodies", "datums=9")
    told = one_line("serve", "--retention", "stability_s=9")
    assert "settings: retention.stability_s: now retention.results_s (" in told
    monkeypatch.setenv("SKYRL_TINKER_TRAINER_THREADS", "2")
    assert "environment variable SKYRL_TINKER_TRAINER_THREADS: no setting any more" in one_line("serve")
    told = one_line("serve", "--key-models", "5")
    assert (
        told == "skyrl-tinker: settings: --key-models: now keys.models (--keys models=…, [keys] in a file)\n"
    )


def test_former_names_have_successors_and_are_free() -> None:
    keys = {key for name in config.Settings.model_fields for key in config.keys_of(name)}
    assert {new for new in config.FORMER.values() if new} <= keys
    assert not config.FORMER.keys() & config.Settings.model_fields.keys()


def test_the_shown_settings_are_a_file_that_gives_them_again(tmp_path: Path) -> None:
    given = ["--port", "3", "--vllm-args", 'speculative-config={"a": [1, true]}', "--placement", "separate"]
    given += ["--keys", "models=3", "--also", "org/teacher"]
    shown = CliRunner().invoke(app, ["serve", "--show-config", *given, "--sampler-urls", "http://a:1"]).stdout
    file = tmp_path / "settings.toml"
    file.write_text(shown)
    loaded = config.load(file)
    assert loaded.model_fields_set == {"port", "vllm_args", "placement", "sampler_urls", "keys", "bases"}
    assert loaded.keys.model_fields_set == {"models"}
    assert loaded.bases["org/teacher"].model_fields_set == {"roles"}
    assert loaded.vllm_args == {"speculative-config": {"a": [1, True]}}
    assert (loaded.port, loaded.sampler_urls) == (3, ("http://a:1",))
    assert "\n# token_budget = 2048\n" in shown
    fields = config.Settings.model_fields
    expected = {key.partition(".NAME")[0] for name in fields for key in config.keys_of(name) or (name,)}
    assert {line.removeprefix("# ").split()[0] for line in shown.splitlines()[1:]} == expected


def test_every_option_of_every_command_says_its_meaning() -> None:
    def unexplained(group: Any, path: str = "") -> list[str]:
        found = []
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                found += unexplained(command, f"{path}{name} ")
            for each in command.params:
                if each.param_type_name == "option" and (each.help or "[").startswith("["):
                    found.append(f"{path}{name} {each.name}")
        return found

    assert unexplained(get_command(app)) == []


def test_all_of_make_model_has_help() -> None:
    for parameter in get_command(app).commands["make-model"].params:
        assert parameter.help


def test_a_demo_of_an_unknown_family_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = CliRunner().invoke(app, ["demo", "--arch", "gpt"])
    assert "--arch must be one of qwen3, qwen3-moe, " in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_engine_alone_wants_a_settings_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["engine", str(tmp_path / "none.json")])
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"garbage", "Invalid JSON"),
        (b"\x88ij\x93", "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON"),
        (b"{}", "allowed_hosts is missing, expected every setting"),
        (b'{"home": 3}', "home: Input is not a valid path"),
        (b'{"architectures": ["A"]}', "architectures is not supported"),
    ],
)
def test_the_engine_alone_refuses_a_file_of_something_else(tmp_path: Path, content: bytes, said: str) -> None:
    (file := tmp_path / "settings.json").write_bytes(content)
    message = one_line("engine", file)
    assert f"{file}: " in message
    assert said in message


def test_the_engine_alone_makes_no_home(tmp_path: Path) -> None:
    (file := tmp_path / "settings.json").write_text(config.load(home=tmp_path / "home").model_dump_json())
    assert "no server has run there" in one_line("engine", file)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--home", ""),
        ("status", "--home", ""),
        ("serve", "--tls-cert", ""),
        ("demo", "--out", ""),
        ("make-model", ""),
        ("import-adapter", ""),
        ("db", "backup", ""),
        ("db", "relocate", "", "/tmp"),
        ("follow", ""),
    ],
)
def test_an_empty_path_is_not_the_current_directory(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert "found an empty text, expected a path" in result.stderr


def test_an_empty_url_is_not_the_server_of_the_home() -> None:
    assert "--url, or TINKER_BASE_URL: found ''" in one_line("status", "--url", "")


def one_line(*arguments: str | Path) -> str:
    """The line with which a command fails."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1), result.output
    return result.stderr


@pytest.mark.parametrize("damage", ["it is something else", "its pages are broken"])
@pytest.mark.parametrize("command", [("keys", "list"), ("keys", "create", "--name", "a"), ("serve",)])
def test_a_damaged_database_is_named(tmp_path: Path, command: tuple[str, ...], damage: str) -> None:
    file = tmp_path / "skyrl-tinker.db"
    migrate(f"sqlite:///{file}")
    pages = file.read_bytes()
    kept = b"" if damage == "it is something else" else pages[:4096]
    file.write_bytes(kept + b"\x7f" * (len(pages) - len(kept)))
    told = one_line(*command, "--home", tmp_path)
    assert f"the database {file} is damaged (" in told
    assert "put a copy in its place" in told


def test_a_disk_that_is_full_under_the_database_is_told(tmp_path: Path) -> None:
    migrate(config.load(home=tmp_path).store_url)
    with files_up_to(100):
        told = one_line("keys", "create", "--name", "a", "--home", tmp_path)
    assert told.startswith("skyrl-tinker: ")


def test_a_file_where_a_directory_has_to_be_is_named() -> None:
    assert one_line("make-model", "/dev/null/x") == "skyrl-tinker: /dev/null/x: Not a directory\n"


def test_a_seed_below_0_is_refused_by_its_option() -> None:
    told = CliRunner().invoke(app, ["make-model", "/dev/null/x", "--seed", "-1"])
    assert (told.exit_code, "'--seed'" in told.stderr) == (2, True)


def test_help_names_the_values_of_a_closed_set() -> None:
    shown = " ".join(CliRunner().invoke(app, ["serve", "--help"]).stdout.split())
    for values in ("--device cpu|cuda", "--placement auto|separate|colocated"):
        assert values in shown


def test_an_example_in_help_keeps_its_lines() -> None:
    shown = CliRunner().invoke(app, ["db", "relocate", "--help"]).stdout
    assert "\n    mv /disk/checkpoints /large/checkpoints\n    skyrl-tinker db relocate" in shown


def test_a_variable_of_several_values_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_TINKER_SAMPLER_URLS", "http://a:1")
    told = one_line("serve")
    assert told.startswith("skyrl-tinker: environment variable SKYRL_TINKER_SAMPLER_URLS: expected JSON, as ")


def test_a_number_without_an_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("retention = {history_s = inf}\n")
    assert one_line("serve", "--config", file) == (
        "skyrl-tinker: settings: retention.history_s: Input should be a finite number, found inf\n"
    )


@pytest.mark.parametrize("text", ["", "[[1, ", "[1]", '{"a": 1}'])
def test_a_damaged_list_of_processes_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run" / "processes.json"
    file.parent.mkdir()
    file.write_text(text)
    told = one_line("serve", "--home", tmp_path)
    assert told.startswith(f"skyrl-tinker: {file} is damaged (")
    assert told.endswith("delete that file, and start again\n")


def test_a_database_of_a_newer_release_is_told(tmp_path: Path) -> None:
    file = tmp_path / "skyrl-tinker.db"
    migrate(f"sqlite:///{file}")
    with sqlite3.connect(file) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    told = one_line("keys", "list", "--home", tmp_path)
    assert told.startswith("skyrl-tinker: the database is of another release than this one, ")
    assert "'9999'" in told


def test_a_directory_in_place_of_the_database_is_named_and_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.mkdir(mode=0o755)
    told = one_line(
        "keys", "create", "--name", "a", "--home", tmp_path, "--database-url", f"sqlite:///{place}"
    )
    assert told == f"skyrl-tinker: database_url: {place} is a directory, expected a file\n"
    assert stat.S_IMODE(place.stat().st_mode) == 0o755


def test_a_name_with_bytes_beyond_utf_8_is_no_bug(tmp_path: Path) -> None:
    migrate(config.load(home=tmp_path).store_url)
    told = one_line("keys", "revoke", "al\udcffice", "--home", tmp_path)
    assert told == "skyrl-tinker: '\\udcff' is no text in utf-8\n"


def test_a_full_disk_is_told_where_a_write_names_no_file(tmp_path: Path) -> None:
    with files_up_to(1):
        told = one_line("keys", "create", "--name", "a", "--home", tmp_path)
    assert told == "skyrl-tinker: home, /tmp or /dev/shm: File too large\n"


@pytest.mark.parametrize("setting", ["home", "checkpoints", "snapshots"])
def test_a_file_in_place_of_a_directory_is_told_with_its_option(tmp_path: Path, setting: str) -> None:
    (file := tmp_path / "file").touch()
    told = one_line("serve", "--home", tmp_path / "home", f"--{setting}", file)
    assert told.startswith(f"skyrl-tinker: cannot create {file}")
    assert told.endswith(f"; choose another directory with --{setting}\n")


@pytest.mark.parametrize(
    "command",
    [
        "keys list",
        "keys limit a --models 1",
        "keys rotate a",
        "keys revoke a",
        "keys adopt a --from b",
        "keys purge a",
        "keys rotate-secrets",
        "db backup copy.db",
        "db relocate /old /tmp",
    ],
)
def test_commands_that_read_or_change_make_no_home(tmp_path: Path, command: str) -> None:
    home = tmp_path / "home"
    told = one_line(*command.split(), "--home", home)
    assert told == f"skyrl-tinker: no database {home}/skyrl-tinker.db: no server has run there\n"
    assert not list(tmp_path.iterdir())


def test_any_home_has_its_own_database(tmp_path: Path) -> None:
    home = tmp_path / "50%25 of a?b"
    assert file_of(config.load(home=home).store_url) == home / "skyrl-tinker.db"
    assert one_line("keys", "list", "--home", home).startswith(f"skyrl-tinker: no database {home}/")
    assert not list(tmp_path.iterdir())


def test_an_ipv6_address_may_have_its_brackets() -> None:
    assert config.load(host="[::1]").host == config.load(host="::1").host == "::1"


def test_more_lines_than_memory_are_refused() -> None:
    assert CliRunner().invoke(app, ["logs", "-n", "99999999999999999999"]).exit_code == 2


@pytest.mark.parametrize("option", ["--models", "--stored-gb"])
def test_a_limit_that_no_integer_of_64_bits_has_is_refused(tmp_path: Path, option: str) -> None:
    assert CliRunner().invoke(app, ["keys", "create", "--name", "a", "--home", str(tmp_path)]).exit_code == 0
    huge = "9" * 400 if option == "--stored-gb" else "9" * 23
    told = one_line("keys", "limit", "a", option, huge, "--home", tmp_path)
    assert told.startswith(f"skyrl-tinker: {option[2:].replace('-', '_')}: ")
    assert told.endswith(", expected a number, none or default\n")
