"""The API as its own process, spoken to by the unmodified SDK, with the test as the engine behind it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from sqlalchemy import select

from skyrl_tinker.api import api_process, bounded_connections
from skyrl_tinker.api.api_process import ApiServer, read_bases
from skyrl_tinker.api.app import create_app
from skyrl_tinker.api.middleware import arriving_body
from skyrl_tinker.api.services import Services
from skyrl_tinker.config import Bodies, ConnectionLimits, Settings, Timeouts
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.errors import StartupError
from skyrl_tinker.protocol.schemas.session import SdkFlags
from skyrl_tinker.store.database.tables import Session
from skyrl_tinker.store.doorbell import SocketBell
from skyrl_tinker.store.store import Store
from tests.api.support.engine import Engine, working
from tests.api.support.process import Api, launched
from tests.api.support.world import BASE, FACTS, new_home, write_facts
from tests.support.loop_time import skip
from tests.support.reads import reading
from tests.support.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "ray", "transformers", "vllm", "peft"}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def settings(tmp_path: Path, listener: socket.socket) -> Settings:
    return new_home(tmp_path / "home", timeouts={"long_poll_s": 20.0}, port=listener.getsockname()[1])


@pytest.fixture
def api(settings: Settings, listener: socket.socket) -> Iterator[Api]:
    with launched(settings, listener) as made:
        yield made


async def until_up(api: Api, store: Store) -> None:
    await write_facts(store)
    await asyncio.to_thread(api.wait_until_up)


@pytest.fixture
async def engine(store: Store, api: Api) -> AsyncIterator[Engine]:
    await until_up(api, store)
    async with working(store, api.settings.root) as made:
        yield made


async def use_sdk(api: Api, scenario: str) -> None:
    assert await exit_code(api, scenario) == 0


async def exit_code(api: Api, scenario: str) -> int:
    user = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.api.support.sdk_scenarios", api.url, scenario),
        cwd=ROOT,
        env={**os.environ, "TINKER_API_KEY": "tml-test"},
    )
    return await asyncio.wait_for(user.wait(), PATIENCE_S)


async def test_the_sdk_trains_samples_and_finishes_its_session(
    api: Api, engine: Engine, store: Store
) -> None:
    await use_sdk(api, "train_and_sample")
    passes = [number for kind, number in engine.order if kind is RequestKind.FORWARD_BACKWARD]
    assert set(passes) == {1, 2, 3}
    assert passes[-1] == 1  # the SDK sends the first chunk last
    with reading(store) as conn:
        assert conn.scalar(select(Session.finish_reason)) == "success"


async def test_the_sdk_hears_at_once_what_was_wrong(api: Api, engine: Engine) -> None:
    await use_sdk(api, "be_wrong")
    assert (RequestKind.FORWARD_BACKWARD, 1) in engine.order  # failed, and its seq_id taken


async def test_one_of_several_processes_has_its_part_of_the_connections(
    settings: Settings, listener: socket.socket, store: Store
) -> None:
    changes = {"api_processes": 3, "connections": ConnectionLimits(per_address=7)}
    with launched(settings.model_copy(update=changes), listener) as api, ExitStack() as stack:
        await until_up(api, store)
        clients = [stack.enter_context(httpx.Client(base_url=api.url)) for _ in range(5)]
        assert [client.get("/healthz").status_code for client in clients] == [200] * 3 + [503] * 2


@pytest.mark.parametrize("compress", [True, False])
async def test_the_sdk_sends_zstd_where_the_setting_asks_for_it(
    settings: Settings, listener: socket.socket, store: Store, compress: bool
) -> None:
    """A body of more than a MiB is accepted here only if it is compressed."""
    changes = {"bodies": Bodies(wire_mb=1), "sdk": SdkFlags(proto_compress_fwdbwd=compress)}
    with launched(settings.model_copy(update=changes), listener) as api:
        await until_up(api, store)
        async with working(store, settings.root):
            assert (await exit_code(api, "train_on_a_megabyte") == 0) == compress


async def test_it_has_sockets_for_thousands_of_long_polls(api: Api, store: Store) -> None:
    await until_up(api, store)
    soft, hard = psutil.Process(api.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
async def test_it_ends_well_when_it_is_stopped_and_when_it_is_replaced(
    api: Api, store: Store, signum: signal.Signals
) -> None:
    await until_up(api, store)
    await asyncio.to_thread(api.stop, signum)


async def test_a_large_chunked_body_gets_its_413(api: Api, store: Store) -> None:
    await until_up(api, store)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield bytes(1 << 20)

    async with httpx.AsyncClient(base_url=f"{api.url}/api/v1") as http:
        answer = await http.post("forward_backward", content=pieces(), timeout=300)
    assert answer.status_code == 413
    assert int(answer.headers["content-length"]) > 0


@dataclass
class Serving:
    """An API in this process, so that a test can wait for its state. `ended`: done once it has stopped."""

    server: ApiServer
    services: Services
    ended: "asyncio.Task[None]"


@asynccontextmanager
async def serving(settings: Settings, listener: socket.socket, store: Store) -> AsyncIterator[Serving]:
    bell = SocketBell.bind(settings.root, "api")
    app = create_app(settings, store, Bases((FACTS,)), bell)
    server = ApiServer(app)
    ended = asyncio.create_task(server.serve([listener]))
    await until(lambda: server.started)
    try:
        yield Serving(server, app.state.services, ended)
    finally:
        server.request_stop()
        await ended
        bell.close()


def signal_ourselves(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


async def test_sigterm_answers_long_polls(settings: Settings, listener: socket.socket, store: Store) -> None:
    settings = settings.model_copy(update={"timeouts": Timeouts.model_construct(long_poll_s=3600.0)})
    url = f"http://127.0.0.1:{settings.port}/api/v1"
    async with (
        serving(settings, listener, store) as made,
        httpx.AsyncClient(base_url=url, timeout=None) as http,
    ):
        session = (await http.post("create_session", json={})).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
        request = {"request_id": (await http.post("create_model", json=body)).json()["request_id"]}
        polls = [asyncio.create_task(http.post("retrieve_future", json=request)) for _ in range(50)]
        await until(lambda: made.services.waiter.waiting == len(polls))
        signal_ourselves(signal.SIGTERM)
        answers = await asyncio.gather(*polls)
        await asyncio.wait_for(made.ended, PATIENCE_S)
    assert {answer.status_code for answer in answers} == {408}


async def test_a_replaced_process_answers_what_a_new_connection_asks(
    settings: Settings, listener: socket.socket, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_connections, "_FIRST_REQUEST_S", 3600.0)
    async with serving(settings, listener, store) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", settings.port)
        await until(lambda: made.server.server_state.connections)
        signal_ourselves(signal.SIGUSR2)
        await until(lambda: listener.fileno() == -1)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await asyncio.wait_for(made.ended, PATIENCE_S)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer.lower()


async def test_a_replaced_process_waits_for_the_rest_of_a_body_until_it_is_stopped(
    settings: Settings, listener: socket.socket, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving_body, "GRACE_S", 3600.0)
    body = b'{"sdk_version": "0.38.0"}'
    head = (
        b"POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    async with serving(settings, listener, store) as made:
        (reader, writer), (_, other) = [
            await asyncio.open_connection("127.0.0.1", settings.port) for _ in range(2)
        ]
        for each in (writer, other):
            each.write(head + body[:1])
        await until(lambda: len(made.server.server_state.tasks) == 2)
        signal_ourselves(signal.SIGUSR2)
        await until(lambda: made.server._draining is not None)
        skip(api_process._RETIRE_S / 2)
        writer.write(body[1:])
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        assert not made.ended.done()
        signal_ourselves(signal.SIGTERM)
        await asyncio.wait_for(made.ended, PATIENCE_S)
        writer.close()
        other.close()


class BrokenBell(SocketBell):
    async def wait(self, timeout: float) -> bool:  # noqa: ASYNC109
        raise OSError("the socket is gone")


async def test_it_ends_rather_than_serve_without_waking_long_polls(
    settings: Settings, listener: socket.socket, store: Store
) -> None:
    bell = BrokenBell.bind(settings.root, "api")
    server = ApiServer(create_app(settings, store, Bases((FACTS,)), bell))
    await asyncio.wait_for(server.serve([listener]), PATIENCE_S)
    bell.close()


async def test_it_dies_with_its_parent(
    settings: Settings, listener: socket.socket, store: Store, tmp_path: Path
) -> None:
    await write_facts(store)
    file = tmp_path / "settings.json"
    file.write_text(settings.model_dump_json())
    child = await asyncio.to_thread(_start_under_a_parent_and_kill_that, settings, listener, file)
    await until(lambda: not _alive(child))


def _start_under_a_parent_and_kill_that(settings: Settings, listener: socket.socket, file: Path) -> int:
    fd = listener.fileno()
    code = (
        "import subprocess, sys\n"
        f"command = [sys.executable, '-m', 'skyrl_tinker.api.api_process', {str(file)!r}, '{fd}']\n"
        f"p = subprocess.Popen(command, pass_fds=[{fd}])\n"
        "print(p.pid, flush=True)\np.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, pass_fds=[fd])
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    Api(f"http://127.0.0.1:{settings.port}", parent, settings).wait_until_up()
    parent.kill()
    parent.wait()
    return child


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_without_facts_it_says_who_writes_them(store: Store, tmp_path: Path) -> None:
    bell = SocketBell.bind(tmp_path, "api")
    with pytest.raises(StartupError, match="skyrl-tinker serve"):
        await read_bases(store, bell, within_s=0.2)
    await write_facts(store)
    assert (await read_bases(store, bell)).all == (FACTS,)
    bell.close()


def test_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, skyrl_tinker.api.api_process; print(*{name.partition('.')[0] for name in sys.modules})"
    )
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not HEAVY & set(modules.split())
    assert "fastapi" in modules.split()
