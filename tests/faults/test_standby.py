"""A standby takes over a server that stands still or is cut off: clients only wait longer.

The two share nothing but the database and object storage.
tests/faults/test_cluster.py kills one, with its host.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from tests.support.serve import HEAL_S, START_S, STOP_S, Serve, wait_until
from tests.support.wire import Wire


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")


class Pair:
    """A server, a standby, and an API process that needs neither's home."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root = root
        self._stack = stack
        stack.enter_context(object_storage())
        postgres = stack.enter_context(postgres_server(durable=True))
        url = postgres.new_database(template="template1")
        self.wire = Wire(postgres.port)
        stack.callback(self.wire.close)
        self.first = self._serve("first", url.replace(f":{postgres.port}/", f":{self.wire.port}/"))
        secrets = self.first.wait_ready().home
        host = api_host(root / "api", "--database-url", url, secrets_of=secrets)
        self.url = stack.enter_context(host).wait_up().url
        (root / "second").mkdir()
        shutil.copy(secrets / FILE, root / "second" / FILE)
        self.second = self._serve("second", url)

    def _serve(self, name: str, database: str) -> Serve:
        shared = [
            part
            for each in ("checkpoints", "snapshots")
            for part in (f"--{each}", f"s3://{BUCKET}/{self._root.name}/{each}")
        ]
        listening = ("--engine-listen", "127.0.0.1:0", "--standby")
        served = Serve(self._root / name, "--database-url", database, *shared, *listening)
        self._stack.callback(served.close)
        return served

    def stop(self) -> list[psutil.Process]:
        """As when a virtual machine is paused."""
        tree = self.first.tree()
        for process in tree:
            process.suspend()
        return tree


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path, stack)


def test_a_server_that_stood_still_commits_nothing_when_it_goes_on_and_ends(pair: Pair) -> None:
    with training(pair) as go_on:
        engine = pair.first.find("engine")
        assert engine is not None
        root, *others = pair.stop()
        go_on()
        for process in others:
            process.resume()
        go_on()  # the late engine runs it as well
        assert wait_until(lambda: not engine.is_running() or is_zombie(engine), HEAL_S)
        assert "another server has taken over" in (pair.first.home / "logs" / "engine.log").read_text()
        root.resume()
        assert_ended(pair.first)
        go_on()


def test_a_server_whose_network_was_cut_commits_nothing_and_ends(pair: Pair) -> None:
    with training(pair) as go_on:
        pair.wire.cut()
        go_on()
        assert pair.first.process.poll() is None
        pair.wire.mend()
        assert_ended(pair.first)
        go_on()


@contextmanager
def training(pair: Pair) -> Iterator[Callable[[], None]]:
    """Train and sample through the API process; what is yielded goes on a round, as in a quiet run."""
    params = types.SamplingParams(max_tokens=20, seed=5, temperature=1.0, stop=[])
    with tinker.ServiceClient(base_url=pair.url) as service:
        client = Client(pair.url, service)
        assert wait_until(lambda: httpx.get(f"{pair.url}/readyz").status_code == 200, START_S)
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
        pair.second.wait_ready()


def assert_ended(server: Serve) -> None:
    assert server.process.wait(STOP_S) == 1
    assert wait_until(lambda: not server.left(), STOP_S)
    assert server.process.stderr is not None
    assert "another server has taken over" in server.process.stderr.read()
