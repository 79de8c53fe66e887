"""Keys from where people meet them: our command line, and the unmodified SDK and its own."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import Result
from sqlalchemy import Connection
from typer.testing import CliRunner

from skyrl_tinker.cli.commands import app
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import OwnerId, SessionId
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.store import api_keys, owners, session_records
from skyrl_tinker.store.database.opening import file_of
from skyrl_tinker.store.store import write_once
from tests.api.support.process import Api, launched_on
from tests.api.support.world import settings_for, write_facts
from tests.support.sdk_command import run_tinker
from tests.support.waiting import wait_until


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with launched_on(tmp_path / "home", write_facts) as (made, _):
        yield made


def ours(settings: Settings, *arguments: str, expected: int = 0) -> Result:
    done = CliRunner().invoke(app, [*arguments, "--home", str(settings.root)])
    assert done.exit_code == expected, done.stderr
    return done


class Laptop:
    """Somebody's, with the SDK on it and a home of its own."""

    def __init__(self, api: Api, home: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
        self._environment = {**kept, "HOME": str(home), "TINKER_BASE_URL": api.url, "TINKER_TELEMETRY": "0"}

    def tinker(self, *arguments: str, typed: str = "", key: str | None = None) -> tuple[int, str]:
        """Exit code and all that was printed."""
        given = {} if key is None else {"TINKER_API_KEY": key}
        streams = {"input": typed, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = run_tinker(arguments, {**self._environment, **given}, **streams)
        return done.returncode, done.stdout


@pytest.fixture
def laptop(api: Api, tmp_path: Path) -> Laptop:
    home = tmp_path / "laptop"
    home.mkdir()
    return Laptop(api, home)


def test_a_key_made_while_the_server_runs_logs_its_holder_in_and_out(api: Api, laptop: Laptop) -> None:
    key = ours(api.settings, "keys", "create", "--name", "alice@example.com").stdout.strip()
    wait_until_locked(api)
    code, said = laptop.tinker("auth", "login", typed=f"{key}\n")
    assert (code, "Logged in as alice@example.com (local)" in said) == (0, True), said
    code, said = laptop.tinker("--format", "json", "auth", "whoami")
    assert code == 0, said
    assert json.loads(said) == {
        "user_urn": "tml:user:alice@example.com",
        "org_urn": "tml:organization:local",
        "email": "alice@example.com",
    }
    code, said = laptop.tinker("auth", "status")
    assert (code, "Tinker accessible: yes" in said) == (0, True), said
    code, said = laptop.tinker("auth", "logout")
    assert (code, "Removed credential 'alice@example.com'" in said) == (0, True), said
    code, said = laptop.tinker("auth", "login", typed="tml-wrong\n")
    assert (code, "unknown or revoked, expected a live API key of this server" in said) == (1, True), said


def wait_until_locked(api: Api) -> None:
    wait_until(
        lambda: httpx.get(f"{api.url}/api/v1/get_server_capabilities", verify=False).status_code == 401
    )


def test_without_keys_any_key_is_somebody(laptop: Laptop) -> None:
    code, said = laptop.tinker("auth", "whoami", key="tml-anything")
    assert code == 0, said
    assert "tml:user:local" in said


def test_keys_are_shown_once_listed_and_revoked(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "home")
    assert "no database" in ours(settings, "keys", "list", expected=1).stderr
    made = ours(settings, "keys", "create", "--name", "alice")
    key = made.stdout.strip()
    assert made.stdout == f"{key}\n"
    assert key.startswith("tml-")
    assert "shown only now" in made.stderr
    new = f"made {file_of(settings.store_url)}: this home is new, no server has run with it"
    assert new in made.stderr
    assert "is new" not in ours(settings, "keys", "create", "--name", "bob").stderr
    assert ours(settings, "keys", "revoke", "alice").stdout == "revoked: 1 alice\n"
    assert "no live key 'alice'" in ours(settings, "keys", "revoke", "alice", expected=1).stderr
    listed = ours(settings, "keys", "list").stdout
    assert key not in listed
    line, _ = listed.splitlines()
    assert line.split()[:2] == ["1", "alice"]
    assert "revoked 2" in line


def test_a_key_is_looked_up_before_anybody_is_asked_about_its_purge(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "home")
    ours(settings, "keys", "create", "--name", "alice")
    for which, told in (("alice", "key 1 (alice) is live: revoke it first"), ("bob", "no key 'bob'")):
        refused = ours(settings, "keys", "purge", which, expected=1).output
        assert told in refused
        assert "delete all" not in refused
    ours(settings, "keys", "revoke", "alice")
    asked = ours(settings, "keys", "purge", "alice", expected=1).output
    assert "delete all that key 1 (alice) made? [y/N]" in asked
    assert "purged: 0 session(s), 0 checkpoint(s)" in ours(settings, "keys", "purge", "1", "--yes").output


def test_what_was_made_without_a_key_can_be_adopted_by_one(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "home")
    ours(settings, "keys", "create", "--name", "first")

    def keyless(conn: Connection) -> SessionId:
        about = {"project_id": None, "display_name": None, "sdk_version": "0.38.0"}
        return session_records.create(conn, owner=None, **about)

    def owned(conn: Connection) -> None:
        owners.require_session(conn, api_keys.find_live(conn, "carol").id, session)

    session = write_once(settings.store_url, keyless)
    told = ours(settings, "keys", "create", "--name", "alice").stderr
    assert "only admin keys see the 1 session(s)" in told
    assert f"a key of the server with home {settings.root}" in told
    with pytest.raises(NotFoundError):
        write_once(settings.store_url, lambda conn: owners.require_session(conn, OwnerId(2), session))
    assert "it owns the 1 session(s)" in ours(settings, "keys", "create", "--name", "carol", "--adopt").stderr
    write_once(settings.store_url, owned)
    assert "session(s)" not in ours(settings, "keys", "create", "--name", "dave").stderr


def test_the_command_line_rotates_adopts_and_ends_keys(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "home")

    def keys(*arguments: str, expected: int = 0) -> Result:
        return ours(settings, "keys", *arguments, expected=expected)

    first = keys("create", "--name", "alice").stdout
    second = keys("rotate", "alice", "--overlap", "0", "--expires-in", "2h").stdout
    assert (len(second.splitlines()), first != second, second[:4]) == (1, True, "tml-")
    keys("create", "--name", "bob", "--expires-in", "30d", "--admin")
    assert (
        "found '3 weeks', expected a number and a unit"
        in keys("rotate", "bob", "--overlap", "3 weeks", expected=2).stderr
    )
    assert "key 1 (alice) is live" in keys("adopt", "bob", "--from", "1", expected=1).stderr
    keys("revoke", "alice")
    assert keys("adopt", "bob", "--from", "1").stdout == "adopted: 0 session(s) of key 1\n"
    assert keys("rotate-secrets").stdout == "rotated: tokens and download URLs from before are refused\n"
    alice, bob = keys("list").stdout.splitlines()
    assert "never used" in alice
    assert "revoked 2" in alice
    assert "live expires 2" in bob
    assert bob.endswith(" admin")
