"""A server on a database that another one works on: refused, or waiting, before it changes anything."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import text

from skyrl_tinker.store.cluster.server_lease import Lease
from skyrl_tinker.store.database.migrate import SCRIPTS
from skyrl_tinker.store.database.opening import open_database
from tests.support.postgres import Postgres
from tests.support.processes import heed_ctrl_c
from tests.support.serve import Serve
from tests.support.waiting import PATIENCE_S, wait_until

OLDER = "0013"


@pytest.fixture
def older(postgres: Postgres) -> str:
    """A database as the version before left it."""
    url = postgres.new_database(template="template1")
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    with open_database(url).connect() as conn, conn.begin():
        config.attributes["connection"] = conn
        command.upgrade(config, OLDER)
        conn.exec_driver_sql("COMMIT")
    return url


@pytest.fixture
def holder(older: str, tmp_path: Path) -> Iterator[Lease]:
    """A server of that version, which works on it."""
    home = tmp_path / "older"
    (home / "run").mkdir(parents=True)
    lease, end = Lease(older, home), threading.Event()
    lease.take(print)

    def beat() -> None:
        while not end.wait(0.5):
            lease.keep()

    beating = threading.Thread(target=beat)
    beating.start()
    yield lease
    end.set()
    beating.join()
    lease.close()


def revision(url: str) -> str:
    with open_database(url).connect() as conn:
        return str(conn.scalar(text("SELECT version_num FROM alembic_version")))


def test_it_is_refused_before_it_migrates(older: str, holder: Lease, tmp_path: Path) -> None:
    server = Serve(tmp_path / "home", "--database-url", older)
    _, complaints = server.process.communicate(timeout=PATIENCE_S)
    assert server.process.returncode == 1
    assert f"another server works on this database: {holder._holder}" in complaints
    assert "Traceback" not in complaints
    assert revision(older) == OLDER


def test_a_standby_waits_without_migrating_and_ends_at_once(
    older: str, holder: Lease, tmp_path: Path
) -> None:
    options = (
        "--database-url",
        older,
        "--checkpoints",
        str(tmp_path / "c"),
        "--snapshots",
        str(tmp_path / "s"),
    )
    home, complaints = tmp_path / "home", tmp_path / "complaints"
    command = [sys.executable, "-m", "skyrl_tinker", "serve", "--home", str(home), "--standby", *options]
    with complaints.open("wb") as errors:
        server = subprocess.Popen([*command, "--port", "0"], stderr=errors, preexec_fn=heed_ctrl_c)
    wait_until(lambda: "waiting for its end" in complaints.read_text())
    assert revision(older) == OLDER
    server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE_S) != 0
    assert "Traceback" not in complaints.read_text()
