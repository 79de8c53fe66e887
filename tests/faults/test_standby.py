"""A standby on another home takes over a server that is killed or stands still: clients only wait longer."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, prompt
from tests.faults.test_engine_death import TOKENS, read_round, rounds, submit_round
from tests.support.api_host import api_host
from tests.support.postgres import postgres_server
from tests.support.serve import HEAL_S, START_S, STOP_S, Serve, wait_until

TAKEN_S = 90  # with a fresh trainer, and replicas that load their model, beside other tests


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")


class Pair:
    """A server, a standby, and an API process that needs neither's home."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root = root
        postgres = stack.enter_context(postgres_server(durable=True))
        database = ("--database-url", postgres.new_database(template="template1"))
        places = [part for name in ("checkpoints", "snapshots") for part in (f"--{name}", str(root / name))]
        self._options = (*database, *places, "--engine-listen", "127.0.0.1:0", "--standby")
        self._stack = stack
        self.first = self._serve("first").wait_ready()
        host = api_host(root / "api", *database, secrets_of=self.first.home)
        self.url = stack.enter_context(host).wait_up().url
        self.second = self._serve("second", secrets_of=self.first.home)

    def _serve(self, name: str, secrets_of: Path | None = None) -> Serve:
        home = self._root / name
        if secrets_of is not None:
            home.mkdir()
            (home / "signing-secrets.json").write_bytes((secrets_of / "signing-secrets.json").read_bytes())
        served = Serve(home, *self._options)
        self._stack.callback(served.close)
        return served


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path, stack)


def kill(tree: list[psutil.Process]) -> None:
    """As when a host loses its power."""
    for process in tree:
        process.suspend()
    for process in tree:
        process.kill()


def stop(tree: list[psutil.Process]) -> None:
    """As when a virtual machine is paused."""
    for process in tree:
        process.suspend()


@pytest.mark.parametrize("how", [kill, stop])
def test_a_standby_takes_over_and_training_goes_on_to_the_bit(
    pair: Pair, how: Callable[[list[psutil.Process]], None]
) -> None:
    params = types.SamplingParams(max_tokens=20, seed=5, temperature=1.0, stop=[])
    with tinker.ServiceClient(base_url=pair.url) as service:
        client = Client(pair.url, service)
        assert wait_until(lambda: httpx.get(f"{pair.url}/readyz").status_code == 200, START_S)
        *expected, last = rounds([client.new_lora()], 6)
        model = client.new_lora()
        before = rounds([model], 2)
        weights = model.save_weights_for_sampler("kept").result().path
        sampler = service.create_sampling_client(model_path=weights).result()
        tokens = sampler.sample(prompt(TOKENS[:8]), 1, params).result().sequences[0].tokens

        tree = pair.first.tree()
        how(tree)
        began = time.monotonic()
        in_flight = submit_round(model, 2)
        assert [*before, [read_round(*in_flight)], *rounds([model], 2, first=3)] == expected
        assert time.monotonic() - began < TAKEN_S
        pair.second.wait_ready()
        assert sampler.sample(prompt(TOKENS[:8]), 1, params).result(HEAL_S).sequences[0].tokens == tokens
        if how is stop:
            for process in tree:
                process.resume()
            assert pair.first.process.wait(STOP_S) == 1
            assert wait_until(lambda: not pair.first.left(), STOP_S)
            assert pair.first.process.stderr is not None
            assert "another server has taken over" in pair.first.process.stderr.read()
        assert rounds([model], 1, first=5) == [last]
