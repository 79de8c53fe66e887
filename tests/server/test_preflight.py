import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import make_url

from skyrl_tinker import config
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.ids import CheckpointKind, ModelState
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import StartupError
from skyrl_tinker.server import preflight
from skyrl_tinker.storage.owner_mark import FILE_NAME
from skyrl_tinker.store import api_keys, checkpoint_records, model_records, session_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.database.postgresql import PostgresDatabase
from skyrl_tinker.store.model_records import NewModel
from skyrl_tinker.store.replay import snapshot_records
from skyrl_tinker.store.replay.snapshot_records import SnapshotRow
from skyrl_tinker.store.store import write_once
from skyrl_tinker.system.process_lock import process_lock
from skyrl_tinker.system.user_directory import make_private, user_directory
from tests.support.certificates import write_certificate


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"replicas": 2, "sampler_urls": ["http://127.0.0.1:9"]}, "--replicas 2 and sampler_urls"),
        ({"router_url": "http://127.0.0.1:9"}, "router_url needs sampler_urls"),
        ({"sampler_urls": ["localhost:9"]}, "sampler_urls: found 'localhost:9', expected http://host:port"),
        ({"sampler_urls": ["http://a:b"]}, "sampler_urls: found 'http://a:b'"),
        ({"sampler_urls": ["http://a:9", "http://a:9/"]}, "sampler_urls name a server twice"),
        ({"sampler_urls": ["http://a:9"], "router_url": "b"}, "router_url: found 'b'"),
        ({"prefill_urls": ["http://a:9"]}, "prefill_urls and decode_urls: found one of them"),
        ({"decode_urls": ["a:9"]}, "decode_urls: found 'a:9', expected http://host:port"),
        (
            {"prefill_urls": ["http://a:9"], "decode_urls": ["http://a:9/"]},
            "prefill_urls and decode_urls name a server twice: http://a:9/, http://a:9",
        ),
        (
            {"prefill_urls": ["http://a:9"], "decode_urls": ["http://b:9"], "sampler_urls": ["http://c:9"]},
            "prefill_urls and sampler_urls",
        ),
        (
            {"prefill_urls": ["http://a:9"], "decode_urls": ["http://b:9"], "router_replay": True},
            "router_replay: found prefill_urls, expected none",
        ),
        (
            {"prefill_urls": ["http://a:9"], "decode_urls": ["http://b:9"], "replicas": 2},
            "--replicas 2 and prefill_urls",
        ),
        ({"placement": "colocated", "phases": {"min_s": 2, "max_s": 1}}, "phases.min_s 2 > phases.max_s 1"),
        (
            {"placement": "colocated", "device": "cuda", "trainer_ranks": 2},
            "2 trainer ranks share their GPUs with 1 sampler GPUs .* make the numbers equal",
        ),
        ({"sampler_urls": ["http://a:9"], "vllm_args": ["seed=1"]}, "vllm_args and sampler_urls"),
        ({"vllm_args": {"max-model-len": 9}}, "max-model-len follows from the setting context_length"),
        (
            {"placement": "colocated", "device": "cuda", "vllm_args": {"data-parallel-size": 2}},
            r"1 trainer ranks share their GPUs with 2 sampler GPUs \(1 replicas x 2\)",
        ),
        ({"ray_address": "head"}, "ray_address: found 'head', expected HOST:PORT or auto"),
        ({"ray_address": "127.0.0.1:9"}, "--ray-address 127.0.0.1:9: no Ray cluster answers this host"),
        ({"standby": True}, "--standby: found a database that is a file"),
        (
            {"standby": True, "database_url": "postgresql+psycopg://u@h/n", "snapshots": "/shared"},
            "--standby: found checkpoints under home",
        ),
        (
            {"standby": True, "database_url": "postgresql+psycopg://u@h/n", "checkpoints": "/shared"},
            "--standby: found snapshots under home",
        ),
        ({"otlp_endpoint": "localhost:4318"}, "otlp_endpoint: found 'localhost:4318', expected http://"),
        ({"device": "cuda", "trainer_dtype": "float32"}, "--trainer-dtype float32 with --device cuda"),
    ],
)
def test_what_is_not_built_or_not_safe_is_refused_with_what_to_change(
    setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        _check(config.load(**setting))


def test_a_host_that_is_in_no_ray_cluster_is_told_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    joined = config.load(ray_address="auto")
    with pytest.raises(StartupError, match=r"it is a node of none.*start one on it with `ray start`"):
        preflight.check_settings(joined)
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
        preflight.check_settings(joined)


SETUP = Path(__file__).parents[2] / "scripts" / "setup"
NO_OPENTELEMETRY = """
import sys

class Blocker:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Blocker())
from skyrl_tinker.cli.commands import app
app(["serve", "--home", sys.argv[1], "--port", "0"])
"""


def test_a_collector_without_the_opentelemetry_packages_is_refused_with_the_extra(tmp_path: Path) -> None:
    home = tmp_path / "home"
    refused = subprocess.run(
        [sys.executable, "-c", NO_OPENTELEMETRY, str(home)],
        env=os.environ | {"SKYRL_TINKER_OTLP_ENDPOINT": "http://localhost:4318"},
        capture_output=True,
        text=True,
    )
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        f"skyrl-tinker: otlp_endpoint: the OpenTelemetry packages are not installed; {SETUP}\n"
    )
    assert not home.exists()
    preflight.check_settings(config.load(otlp_endpoint="http://localhost:4318"))


def test_a_package_that_an_option_needs_is_told_with_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.CheckpointStorage, "probe", Mock(side_effect=ImportError("Install s3fs")))
    with pytest.raises(StartupError, match=f"Install s3fs; {SETUP}$"):
        preflight.check_storage(config.load(home=tmp_path, checkpoints="s3://bucket/a"))
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StartupError, match=f"^database_url needs psycopg: {SETUP} "):
        PostgresDatabase(make_url("postgresql+psycopg://db/tinker"))


def _check(settings: Settings) -> None:
    preflight.check_settings(settings)
    preflight.check_placement(settings)


def test_a_certificate_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    preflight.check_settings(config.load(tls_cert=cert, tls_key=key))
    (other := tmp_path / "other").mkdir()
    _, other_key = write_certificate(other)
    (locked := tmp_path / "locked").mkdir()
    locked_cert, locked_key = write_certificate(locked, password=b"secret")
    for files, message in (
        ({"tls_cert": cert}, "found one of them"),
        ({"tls_cert": cert, "tls_key": tmp_path / "none.pem"}, "none.pem: .*No such file"),
        ({"tls_cert": cert, "tls_key": other_key}, "(?i)mismatch"),
        ({"tls_cert": key, "tls_key": key}, "key.pem: "),
        ({"tls_cert": locked_cert, "tls_key": locked_key}, "expected one without a password"),
    ):
        with pytest.raises(StartupError, match=message):
            preflight.check_settings(config.load(**files))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    migrate(config.load(home=tmp_path).store_url)
    return tmp_path


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_hosts_need_no_keys(home: Path, host: str) -> None:
    preflight.check_host(config.load(home=home, host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "my.machine"])
def test_other_hosts_need_a_key(home: Path, host: str) -> None:
    settings = config.load(home=home, host=host)
    with pytest.raises(StartupError, match=r"no API keys; .*`skyrl-tinker keys create`, .* --insecure"):
        preflight.check_host(settings)
    write_once(settings.store_url, lambda conn: api_keys.create(conn, "alice"))
    preflight.check_host(settings)
    write_once(settings.store_url, lambda conn: api_keys.revoke(conn, "alice"))
    preflight.check_host(settings)  # which lets nobody in, but opens nothing


def test_a_database_that_is_not_there_has_no_keys_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="there are no API keys"):
        preflight.check_host(config.load(home=tmp_path / "home", host="0.0.0.0"))
    assert not (tmp_path / "home").exists()


def test_any_host_goes_when_asked_for(home: Path) -> None:
    preflight.check_host(config.load(home=home, host="0.0.0.0", insecure=True))


def test_a_port_in_use_is_refused_and_port_0_finds_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"127.0.0.1:{port} .*choose another --port"):
            preflight.listen("127.0.0.1", port)
        with preflight.listen("127.0.0.1", 0) as free:
            assert free.getsockname()[1] not in (0, port)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("192.0.2.1", "Cannot assign requested address"),
        ("no.such.host.invalid", ""),
        ("a..b", ""),
        ("a" * 70, ""),
    ],
)
def test_a_host_that_is_not_of_this_machine_is_told_as_such(host: str, reason: str) -> None:
    told = rf"cannot listen on {host}:0 \((?!Unknown).*{reason}.*\); expected --host of"
    with pytest.raises(StartupError, match=told):
        preflight.listen(host, 0)


def test_a_home_has_one_server_at_a_time(tmp_path: Path) -> None:
    directories = Directories(config.load(home=tmp_path))
    directories.make()
    with (
        process_lock(directories.server_lock, "server"),
        pytest.raises(StartupError, match=r"another server \(pid \d+\)"),
        process_lock(directories.server_lock, "server"),
    ):
        pass
    with process_lock(directories.server_lock, "server"):
        pass


def test_directories_that_others_can_reach_are_ours_alone(tmp_path: Path) -> None:
    directories = Directories(config.load(home=tmp_path))
    directories.make()
    for directory in (directories.bell_dir, directories.ephemeral_dir):
        assert directory.stat().st_mode & 0o077 == 0


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_home_and_what_lies_in_it_is_closed_to_others_also_if_it_was_open(tmp_path: Path) -> None:
    home, elsewhere, new = tmp_path / "home", tmp_path / "elsewhere", tmp_path / "new"
    for directory in (home / "logs", home / "checkpoints", elsewhere):
        directory.mkdir(parents=True)
        directory.chmod(0o775)
    home.chmod(0o755)
    for checkpoints in (None, elsewhere, new):
        Directories(config.load(home=home, checkpoints=checkpoints)).make()
    assert {path.name: oct(_mode(path)) for path in (home, new, *home.iterdir()) if _mode(path) & 0o077} == {}
    assert _mode(elsewhere) == 0o775, "the admin's"


def test_a_home_in_a_directory_for_all_leaves_that_to_all(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    Directories(config.load(home=tmp_path)).make()
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777
    assert _mode(tmp_path / "run") == 0o700


def test_who_takes_our_names_in_tmp_does_not_keep_the_server_from_starting(tmp_path: Path) -> None:
    """Nobody can take them all, and all processes of a server find the same one."""
    home, uid = tmp_path / "home", os.getuid()
    name = f"skyrl-tinker-{uid}"
    (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / f"{name}.1").touch()
    (tmp_path / f"{name}0").mkdir()  # of another number
    found = user_directory(tmp_path, home)
    assert found.parent.name == f"{name}.2"
    for path in (found.parent, found):
        make_private(path)
    (tmp_path / name).unlink()
    assert user_directory(tmp_path, home) == found


def test_what_a_deleted_home_left_in_shared_memory_is_freed(tmp_path: Path) -> None:
    kept, deleted = (Directories(config.load(home=tmp_path / name)) for name in ("kept", "deleted"))
    for directories in (kept, deleted):
        directories.make()
    shutil.rmtree(deleted.home)
    kept.delete_orphaned()
    assert kept.ephemeral_dir.exists()
    assert not deleted.ephemeral_dir.exists()
    assert not deleted.bell_dir.exists()


def test_a_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight.check_room(tmp_path / "not" / "there")
    monkeypatch.setattr(preflight, "START_BYTES", 1 << 60)
    with pytest.raises(
        StartupError, match=r"MiB are free at .*/home, .* nothing that was acknowledged is lost"
    ):
        preflight.check_room(tmp_path / "home")


def with_rows(home: Path, checkpoints: Path) -> Settings:
    """A home whose database has a checkpoint and a snapshot."""
    settings = config.load(
        home=home, checkpoints=str(checkpoints), snapshots=str(checkpoints.parent / "live")
    )
    Directories(settings).make()
    migrate(settings.store_url)
    session = write_once(
        settings.store_url, lambda conn: session_records.create(conn, owner=None, sdk_version="0.38.0")
    )
    run = NewModel(session, 0, "tiny", LoraSpec(8, 1), {"type": "adamw"}, {})
    key = write_once(settings.store_url, lambda conn: model_records.add(conn, run, ModelState.READY, None))
    saved = settings.checkpoint_root / str(key) / "weights" / "a~2.0a1b2c3d"
    snapshot = Directories(settings).snapshot_dir / str(key) / "6.0a1b2c3d"
    new = NewCheckpoint(key, CheckpointKind.WEIGHTS, "a", str(saved), "tiny", LoraSpec(8, 1), 1)
    write_once(settings.store_url, lambda conn: checkpoint_records.add(conn, new, replace=False))
    row = SnapshotRow(6, str(snapshot), optimizer=True)
    write_once(settings.store_url, lambda conn: snapshot_records.put(conn, key, row))
    for directory in (saved, snapshot):
        directory.mkdir(parents=True)
    return settings


@pytest.mark.parametrize(("name", "disk"), [("checkpoints", "saved"), ("snapshots", "live")])
def test_a_start_without_the_disk_of_what_is_recorded_is_refused_and_harms_nothing(
    tmp_path: Path, name: str, disk: str
) -> None:
    settings = with_rows(tmp_path / "home", tmp_path / "saved")
    for _ in range(2):  # the first one from before there were marks
        preflight.claim_storage(settings)
    (tmp_path / disk).rename(tmp_path / "unmounted")
    Directories(settings).make()
    with pytest.raises(
        StartupError, match=f"^--{name} {tmp_path}/.* found none of the files .* mount"
    ) as refused:
        preflight.claim_storage(settings)
    (tmp_path / disk).rename(tmp_path / "empty")
    (tmp_path / "unmounted").rename(tmp_path / disk)
    preflight.claim_storage(settings)
    (tmp_path / disk).rename(tmp_path / "burnt")
    Directories(settings).make()
    root = settings.checkpoint_root if name == "checkpoints" else Directories(settings).snapshot_dir
    line = str(refused.value).partition("write the line ")[2].split()[0]
    (root / FILE_NAME).write_text(f"{line}\n")
    preflight.claim_storage(settings)


def test_a_restored_database_needs_no_directory_below_its_home(tmp_path: Path) -> None:
    settings = with_rows(tmp_path / "home", tmp_path / "home" / "checkpoints")
    for each in ("checkpoints", "live"):
        shutil.rmtree(tmp_path / "home" / each)
    Directories(settings).make()
    preflight.claim_storage(settings)


def test_directories_of_another_database_are_refused(tmp_path: Path) -> None:
    """Its models have the same numbers, and so the same places."""
    first = with_rows(tmp_path / "first", tmp_path / "saved")
    preflight.claim_storage(first)
    second = config.load(home=tmp_path / "second", checkpoints=first.checkpoints)
    Directories(second).make()
    migrate(second.store_url)
    with pytest.raises(StartupError, match=f"^--checkpoints {tmp_path}/saved: found the files of another"):
        preflight.claim_storage(second)
