"""What `skyrl-tinker api` needs from the server, and says when it is missing."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Connection

from skyrl_tinker.config import Settings, load
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.errors import StartupError
from skyrl_tinker.server import shared_settings
from skyrl_tinker.server.api_host import serve_api
from skyrl_tinker.store import server_state
from skyrl_tinker.store.cluster.signing_secrets import FILE, SigningSecrets, rotate
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.store import write_once
from skyrl_tinker.system.process_lock import process_lock
from tests.api.support.world import FACTS
from tests.support.api_host import ApiHost, api_host
from tests.support.postgres import Postgres
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture
def server(postgres: Postgres, tmp_path: Path) -> Settings:
    """Settings of a server that has not started yet."""
    home = tmp_path / "server"
    home.mkdir()
    database = postgres.new_database(template="template1")
    return Settings(home=home, database_url=database, engine_listen="127.0.0.1:0", max_lora_rank=16)


def start(settings: Settings) -> None:
    """Write what `serve` writes."""

    def op(conn: Connection) -> None:
        shared_settings.publish(conn, settings)
        server_state.put_bases(conn, Bases((FACTS,)))

    migrate(settings.store_url, settings.root)
    write_once(settings.store_url, op, settings.root)


def refused(host: ApiHost) -> str:
    assert host.process.wait(PATIENCE_S) == 1
    complaints = host.complaints()
    assert "Traceback" not in complaints
    return complaints


def test_it_waits_for_a_server_takes_over_its_settings_and_is_not_ready_without_an_engine(
    server: Settings, tmp_path: Path
) -> None:
    SigningSecrets(server.root).refresh()
    options = ("--database-url", str(server.database_url))
    with api_host(tmp_path / "host", *options, secrets_of=server.root) as host:
        wait_until(lambda: "no server has started" in host.complaints())
        start(server)
        url = host.wait_up().url
        wait_until(lambda: httpx.get(f"{url}/healthz", verify=False).status_code == 200)
        capabilities = httpx.get(f"{url}/api/v1/get_server_capabilities").json()
        assert str(capabilities).count(FACTS.name) > 0
        lora = {"rank": 17, "train_mlp": True, "train_attn": True, "train_unembed": True}
        session = httpx.post(f"{url}/api/v1/create_session", json={"sdk_version": "0.38.0"}).json()
        asked = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": FACTS.name}
        created = httpx.post(f"{url}/api/v1/create_model", json={**asked, "lora_config": lora}).json()
        failed = httpx.post(f"{url}/api/v1/retrieve_future", json={"request_id": created["request_id"]})
        assert "16" in failed.json()["error"], "the server's max_lora_rank"
        ready = httpx.get(f"{url}/readyz")
        assert (ready.status_code, ready.json()["state"]) == (503, "starting")
        assert httpx.get(f"{url}/metrics").status_code == 200
        assert "checkpoints is not here" in host.complaints()
        assert host.end() == 0


def test_other_secrets_none_and_those_that_others_read_are_refused(server: Settings, tmp_path: Path) -> None:
    start(server)
    options = ("--database-url", str(server.database_url))
    with api_host(tmp_path / "none", *options) as host:
        assert f"{tmp_path / 'none' / FILE}: found none, expected the secrets of the server" in refused(host)
        assert not (host.home / FILE).exists(), "it makes none of its own"
    other = tmp_path / "elsewhere"
    other.mkdir()
    rotate(other)
    with api_host(tmp_path / "other", *options, secrets_of=other) as host:
        assert "found other ones" in refused(host)
    (other / FILE).chmod(0o644)
    with api_host(tmp_path / "read", *options, secrets_of=other) as host:
        assert f"found mode 644, by which others may read it; chmod 600 {host.home / FILE}" in refused(host)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda server: server.model_copy(update={"engine_listen": None}), "without engine_listen"),
        (lambda server: server, "no API keys"),
    ],
)
def test_what_the_server_must_have_is_named(
    server: Settings, tmp_path: Path, change: Callable[[Settings], Settings], complaint: str
) -> None:
    start(change(server))
    options = ("--database-url", str(server.database_url), "--host", "0.0.0.0")
    with api_host(tmp_path / "host", *options, secrets_of=server.root) as host:
        assert complaint in refused(host)


def test_a_database_that_is_a_file_is_refused(tmp_path: Path) -> None:
    with api_host(tmp_path / "host") as host:
        assert "expected --database-url postgresql+psycopg://" in refused(host)


def test_another_version_is_refused(
    server: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_settings, "__version__", "0.0.1")
    start(server)
    options = ("--database-url", str(server.database_url))
    with api_host(tmp_path / "host", *options, secrets_of=server.root) as host:
        assert "is skyrl-tinker 0.0.1" in refused(host)


def test_the_home_of_a_running_server_is_refused(server: Settings, tmp_path: Path) -> None:
    """Its settings file is read by all that belongs to it."""
    home = tmp_path / "host"
    (home / "run").mkdir(parents=True)
    settings = load(home=home, database_url=server.database_url)
    with (
        process_lock(Directories(settings).server_lock, "server"),
        pytest.raises(StartupError, match=f"another server .* runs with --home {home}"),
    ):
        serve_api(settings, print, print)
