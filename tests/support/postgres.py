"""A PostgreSQL server of Debian's package, on a free port and in a directory of its own."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil
import psycopg
import pytest

from skyrl_tinker.store.database.migrate import migrate
from tests.support.hosts import Host
from tests.support.processes import free_port, title

PASSWORD = "secret"
_MIGRATED = "migrated"


class Postgres:
    """Server with a migrated database, of which each test gets a copy."""

    def __init__(
        self, binaries: Path, root: Path, *, durable: bool = False, host: Host | None = None
    ) -> None:
        """`durable`: with fsync, as a real one. `host`: what it runs on, in place of this machine."""
        self._binaries = binaries
        self._root = root
        self._data = root / "data"
        self._durable = durable
        self._host = host
        self._address = host.address if host else "127.0.0.1"
        self.port = 5432 if host else free_port()
        listening = f"-c port={self.port} -c listen_addresses={self._address}"
        self._options = f"{listening} -c unix_socket_directories={root}"
        self._options += "" if durable else " -c fsync=off"
        self._names = count()

    def create(self) -> None:
        """Make its files, start it and make the migrated database."""
        password = self._root / "password"
        password.write_text(PASSWORD)
        initdb = ("initdb", "-D", self._data, "-U", "postgres", "-A", "scram-sha-256", f"--pwfile={password}")
        self._run(*initdb, "--no-sync", "-E", "UTF8", "--locale=C")
        if self._host is None:
            self.start()
            migrate(self.new_database(_MIGRATED, template="template1"))
        else:  # which only its own network reaches
            with (self._data / "pg_hba.conf").open("a") as rules:
                rules.write("host all all samenet scram-sha-256\n")
            self.start()

    def start(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-o", self._options, "-l", self._root / "log", "-w", "start")

    def stop(self, how: str = "fast") -> None:
        """Stop it: `fast` cuts its connections, `immediate` is a crash."""
        self._run("pg_ctl", "-D", self._data, "-m", how, "-w", "stop")

    @contextmanager
    def copy(self) -> Iterator["Postgres"]:
        """Run a copy that has each commit before it is acknowledged."""
        root = self._root / "copy"
        root.mkdir()
        shutil.chown(root, self._root.owner(), self._root.group())
        copy = Postgres(self._binaries, root, durable=self._durable)
        source = f"host={self._address} port={self.port} user=postgres password={PASSWORD}"
        copy._run("pg_basebackup", "-D", copy._data, "-d", source, "-R", "--checkpoint=fast", "--no-sync")
        copy.start()
        try:
            self.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            self.execute("SELECT pg_reload_conf()")
            yield copy
        finally:
            copy.end()

    def promote(self) -> None:
        """Let a copy take over."""
        self._run("pg_ctl", "-D", self._data, "-w", "promote")

    def url_of_either(self, copy: "Postgres", name: str = "postgres") -> str:
        """Return the URL of a database on the one of the two that can be written to."""
        hosts = "&".join(f"host={each._address}:{each.port}" for each in (self, copy))
        start = f"postgresql+psycopg://postgres:{PASSWORD}@/{name}"
        return f"{start}?{hosts}&target_session_attrs=read-write"

    def end(self) -> None:
        if (self._data / "postmaster.pid").exists():  # a test may have stopped it
            self.stop("immediate")

    def new_database(self, name: str | None = None, template: str = _MIGRATED) -> str:
        """Return the URL of a new database, by default a migrated one."""
        name = name or f"test{next(self._names)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def url(self, name: str = "postgres") -> str:
        """Return the URL of a database, by default of one that is not migrated."""
        return f"postgresql+psycopg://postgres:{PASSWORD}@{self._address}:{self.port}/{name}"

    def drop(self, url: str) -> None:
        self.execute(f"DROP DATABASE {url.rpartition('/')[2]} WITH (FORCE)")

    @contextmanager
    def backends_stopped(self) -> Iterator[None]:
        """Let the processes that serve connections stand still; the connections stay open."""
        (pid, *_) = (self._data / "postmaster.pid").read_text().split()
        children = psutil.Process(int(pid)).children()
        backends = [each for each in children if f"{self._address}(" in title(each)]
        assert backends, "nobody is connected"
        for each in backends:
            each.suspend()
        try:
            yield
        finally:
            for each in backends:
                each.resume()

    def execute(self, sql: str) -> None:
        """Run a statement of an administrator."""
        address = f"host=127.0.0.1 port={self.port} user=postgres password={PASSWORD} dbname=postgres"
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(sql.encode())

    def _run(self, program: str, *arguments: str | Path) -> None:
        """Run one of its programs; none of them runs as root."""
        user = "postgres" if os.geteuid() == 0 and self._host is None else None
        enter = self._host.enter_as("postgres") if self._host else ()
        with (self._root / "programs").open("ab") as output:
            command = [*enter, self._binaries / program, *arguments]
            subprocess.run(command, cwd=self._root, user=user, check=True, stdout=output, stderr=output)


@contextmanager
def postgres_server(*, durable: bool = False, host: Host | None = None) -> Iterator[Postgres]:
    """Run a server, on this machine or a host of it.

    Where there is no PostgreSQL the test is skipped, and says how to get it.
    """
    binaries = programs()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    place = "/var/tmp" if host else None  # hosts have their own /tmp
    with tempfile.TemporaryDirectory(prefix="skyrl-postgres-", dir=place) as directory:
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            os.chown(directory, owner.pw_uid, owner.pw_gid)
        server = Postgres(binaries, Path(directory), durable=durable, host=host)
        server.create()
        try:
            yield server
        finally:
            server.end()


def programs() -> Path | None:
    """Return the directory of the newest version's programs; None: PostgreSQL is not installed."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    return versions[-1] if versions else None
