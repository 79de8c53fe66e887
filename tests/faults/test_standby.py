"""A standby takes over a server that stands still or is cut off: clients only wait longer.

The two share nothing but the database and object storage.
tests/faults/test_cluster.py kills one, with its host.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx
import psutil
import pytest
import tinker
from tinker import types

from skyrl_tinker.store.cluster.signing_secrets import FILE
from tests.e2e.support.client import Client, prompt
from tests.faults.test_engine_death import TOKENS, rounds
from tests.support.api_host import api_host
from tests.support.object_storage import BUCKET, object_storage
from tests.support.postgres import postgres_server
from tests.support.processes import is_zombie
from tests.support.serve import HEAL_S, START_S, STOP_S, Serve
from tests.support.waiting import wait_until
from tests.support.wire import Wire

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Started:
    server: Serve
    wire: Wire


class Servers:
    """Servers on one database, each with a home and a way to the database of its own, and an API process."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root = root
        self._stack = stack
        stack.enter_context(object_storage())
        self._postgres = stack.enter_context(postgres_server(durable=True))
        self._database = self._postgres.new_database(template="template1")
        self.first = self.start("first")
        self._secrets = self.first.server.wait_ready().home
        host = api_host(root / "api", "--database-url", self._database, secrets_of=self._secrets)
        self.url = stack.enter_context(host).wait_up().url

    def start(self, name: str) -> "Started":
        """Start one: the first works, and any other stands by."""
        wire = Wire(self._postgres.port)
        self._stack.callback(wire.close)
        home = self._root / name
        if name != "first":
            home.mkdir()
            shutil.copy(self._secrets / FILE, home / FILE)
        places = [
            part
            for each in ("checkpoints", "snapshots")
            for part in (f"--{each}", f"s3://{BUCKET}/{self._root.name}/{each}")
        ]
        database = self._database.replace(f":{self._postgres.port}/", f":{wire.port}/")
        listening = ("--engine-listen", "127.0.0.1:0", "--standby")
        server = Serve(home, "--database-url", database, *places, *listening)
        self._stack.callback(server.close)
        return Started(server, wire)


def test_standbys_take_over_from_one_that_stood_still_and_from_one_that_was_cut_off(tmp_path: Path) -> None:
    """Neither commits anything when it goes on; both end."""
    with ExitStack() as stack:
        servers = Servers(tmp_path, stack)
        go_on = stack.enter_context(training(servers.url))
        first, second = servers.first, servers.start("second")
        engine = first.server.find("engine")
        assert engine is not None
        root, *others = stop(first.server)
        go_on()
        for process in others:
            process.resume()
        go_on()  # the late engine runs it as well
        wait_until(lambda: not engine.is_running() or is_zombie(engine), HEAL_S)
        assert "another server has taken over" in (first.server.home / "logs" / "engine.log").read_text()
        root.resume()
        assert_ended(first.server)

        second.server.wait_ready()
        third = servers.start("third")
        second.wire.cut()
        go_on()
        assert second.server.process.poll() is None
        second.wire.mend()
        assert_ended(second.server)
        go_on()
        third.server.wait_ready()


def stop(server: Serve) -> list[psutil.Process]:
    """As when a virtual machine is paused."""
    tree = server.tree()
    for process in tree:
        process.suspend()
    return tree


@contextmanager
def training(url: str) -> Iterator[Callable[[], None]]:
    """Train and sample through the API process; what is yielded goes on a round, as in a quiet run."""
    params = types.SamplingParams(max_tokens=20, seed=5, temperature=1.0, stop=[])
    with tinker.ServiceClient(base_url=url) as service:
        client = Client(url, service)
        wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200, START_S)
        expected = rounds([client.new_lora()], 6)
        model = client.new_lora()
        numbers = count()
        assert [rounds([model], 1, next(numbers))[0] for _ in range(2)] == expected[:2]
        weights = model.save_weights_for_sampler("kept").result().path
        named = service.create_sampling_client(model_path=weights).result()
        unnamed = model.save_weights_and_get_sampling_client().result()

        def sample() -> list[list[int]]:
            asked = [sampler.sample(prompt(TOKENS[:8]), 1, params) for sampler in (named, unnamed)]
            return [future.result(HEAL_S).sequences[0].tokens for future in asked]

        tokens = sample()

        def go_on() -> None:
            number = next(numbers)
            assert rounds([model], 1, number) == [expected[number]]
            assert sample() == tokens

        yield go_on


def assert_ended(server: Serve) -> None:
    assert server.process.wait(STOP_S) == 1
    wait_until(lambda: not server.left(), STOP_S)
    assert server.process.stderr is not None
    assert "another server has taken over" in server.process.stderr.read()
