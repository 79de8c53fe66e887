"""What one tenant may do to another: each attack in a process of its own, until it is told to stop.

Its processes have the lowest priority while they attack: they stand for another machine.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import tinker
from client import random_datum, random_prompt
from ingest import Body, Client, body_name, random_data
from serving import run_when_idle
from tinker import types

if TYPE_CHECKING:  # seconds that most attacks need not spend
    import torch

ADAM = types.AdamParams(learning_rate=1e-4)
AHEAD = 2
"""Steps that each flooding session has submitted."""
UNITS = 3
"""Units of work that are measured."""
IN_FLIGHT = 64
SAMPLING = types.SamplingParams(max_tokens=64, stop=[])
SEQUENCES = 4
ROW, CONTEXT = 2048, 4096
"""Tokens of one row of the trainer (token_budget), and of the longest sequence."""
BODIES, BODY_DATUMS, BODY_TOKENS = 208, 160, 1031
"""3.3 MB each."""
PIECE, UPLOAD, UPLOADS = 1 << 18, 60_000_000, 8
CONNECTIONS = 300
START_S, STOP_S, UPLOAD_S = 600.0, 600.0, 0.5
ERROR_S = 0.05
"""Pause after an error: a client that is refused asks no more often."""


@dataclass
class Attack:
    """Attack in a process of its own: how often each answer came, and what one unit of its work takes."""

    url: str
    keys: Sequence[str]
    pipe: Connection
    outcomes: Counter[str] = field(default_factory=Counter)
    unit_s: float = 0.0
    _stopped: threading.Event = field(default_factory=threading.Event)

    def go(self, unit_s: float = 0.0) -> None:
        """Say that all is prepared, and what one unit of this attack's work takes; wait for the signal."""
        run_when_idle()
        self.unit_s = unit_s
        self.pipe.send(None)
        self.pipe.recv()
        threading.Thread(target=self._await_stop, daemon=True).start()

    def _await_stop(self) -> None:
        self.pipe.recv()
        self._stopped.set()

    @property
    def on(self) -> bool:
        return not self._stopped.is_set()

    def pause(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    def attempt(self, work: Callable[[], object]) -> float:
        """Count what comes of it; return the seconds that it took."""
        began = time.perf_counter()
        try:
            work()
            self.outcomes["ok"] += 1
        except Exception as error:  # counted: most are expected
            self.outcomes[_named(error)] += 1
            self.pause(ERROR_S)
        return time.perf_counter() - began

    async def repeat(self, work: Callable[[], Awaitable[object]]) -> None:
        """As `attempt`, again and again."""
        while self.on:
            try:
                await work()
                self.outcomes["ok"] += 1
            except Exception as error:  # counted: most are expected
                self.outcomes[_named(error)] += 1
                await asyncio.sleep(ERROR_S)

    def longest(self, work: Callable[[], object]) -> float:
        """Return the seconds of the longest of three attempts: what a unit of this work may take."""
        return max(self.attempt(work) for _ in range(UNITS))

    @contextmanager
    def service(self, key: str) -> Iterator[tinker.ServiceClient]:
        service = tinker.ServiceClient(base_url=self.url, api_key=key)
        try:
            yield service
        finally:
            with suppress(tinker.AuthenticationError):  # its key was revoked
                service.close("success").result()


def _named(error: Exception) -> str:
    lack = "did not fit into the trainer's memory"
    return "out of memory" if lack in str(error) else type(error).__name__


def _lora(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="tiny", rank=8).result()


# Floods


def train(attack: Attack) -> None:
    """Flood the trainer with rows that are full, from a session for each key."""
    data = [random_datum(128) for _ in range(ROW // 128)]
    with ExitStack() as stack:
        models = [_lora(stack.enter_context(attack.service(key))) for key in attack.keys]
        attack.go(attack.longest(lambda: models[0].forward_backward(data, "cross_entropy").result()))
        _together(partial(_keep_training, attack, model, data) for model in models)


def _together(works: Iterator[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _keep_training(attack: Attack, training: tinker.TrainingClient, data: list[types.Datum]) -> None:
    submitted: list[Any] = []
    while attack.on:
        submitted.extend(_step(training, data))
        if len(submitted) > 2 * AHEAD:
            attack.attempt(submitted.pop(0).result)
            attack.attempt(submitted.pop(0).result)
    for future in submitted:
        attack.attempt(future.result)


def _step(training: tinker.TrainingClient, data: list[types.Datum]) -> tuple[Any, Any]:
    return training.forward_backward(data, "cross_entropy"), training.optim_step(ADAM)


def sample(attack: Attack) -> None:
    """Keep many samples of several sequences in flight."""
    with attack.service(attack.keys[0]) as service:
        sampler = service.create_sampling_client(base_model="tiny").result()

        def one() -> Any:
            return sampler.sample(random_prompt(16), SEQUENCES, SAMPLING)

        attack.go(attack.longest(lambda: one().result()))
        asyncio.run(_at_once(attack, IN_FLIGHT, one))


async def _at_once(attack: Attack, count: int, work: Callable[[], Awaitable[object]]) -> None:
    await asyncio.gather(*(attack.repeat(work) for _ in range(count)))


def completions(attack: Attack) -> None:
    """As `sample`, by the OpenAI-compatible route."""
    asyncio.run(_completions(attack))


async def _completions(attack: Attack) -> None:
    body = {"model": "tiny", "prompt": "Which letter?", "max_tokens": SAMPLING.max_tokens, "n": SEQUENCES}
    async with _http(attack.keys[0]) as http:

        async def one() -> None:
            async with http.post(f"{attack.url}/oai/api/v1/completions", json=body) as answer:
                await answer.read()
                answer.raise_for_status()

        units = []
        for _ in range(UNITS):
            began = time.perf_counter()
            await one()
            units.append(time.perf_counter() - began)
        await asyncio.to_thread(attack.go, max(units))
        await _at_once(attack, IN_FLIGHT, one)


def _http(key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={"X-API-Key": key},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(),
        read_bufsize=PIECE,
    )


def bodies(attack: Attack) -> None:
    """Send large bodies, all at once and again; the first request of each model is missing, so none runs."""
    asyncio.run(_bodies(attack))


async def _bodies(attack: Attack) -> None:
    data = random_data(BODY_DATUMS, BODY_TOKENS)
    async with _http(attack.keys[0]) as http:
        client = Client(attack.url, http)
        session, models = await client.models("tiny")
        seq_id = 1 + UNITS
        units = [await client.send(Body(body_name(models[0], 2 + number), data)) for number in range(UNITS)]
        await asyncio.to_thread(attack.go, max(units))
        while attack.on:
            seq_id += BODIES // len(models)
            all_of_them = [
                Body(body_name(model, seq_id + number), data)
                for number in range(BODIES // len(models))
                for model in models
            ]
            for answer in await asyncio.gather(*map(client.send, all_of_them), return_exceptions=True):
                attack.outcomes[type(answer).__name__ if isinstance(answer, Exception) else "ok"] += 1
        await client.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})


# Wrong requests


def long_rows(attack: Attack) -> None:
    """Send rows as long as the context, twice the trainer's usual ones; the bench takes its memory away.

    Of several models, so that one always waits and shares the pass of whoever comes. What one takes is
    measured afterwards, when there is memory again: what the trainer had before, it would keep.
    """
    data = [random_datum(CONTEXT - 1)] * 2
    with attack.service(attack.keys[0]) as service:
        models = [_lora(service) for _ in range(3)]
        attack.attempt(models[0].forward([random_datum(ROW)], "cross_entropy").result)
        attack.go()
        _together(partial(_keep_passing, attack, model, data) for model in models)
        attack.unit_s = attack.longest(lambda: models[0].forward_backward(data, "cross_entropy").result())


def _keep_passing(attack: Attack, training: tinker.TrainingClient, data: list[types.Datum]) -> None:
    while attack.on:
        attack.attempt(training.forward_backward(data, "cross_entropy").result)


def not_a_number(attack: Attack) -> None:
    """Send weights of NaN, and make a model of one's own overflow."""
    wrong = random_datum(128)
    wrong.loss_fn_inputs["weights"] = types.TensorData.from_numpy(np.full(128, np.nan, np.float32))
    huge = types.AdamParams(learning_rate=1e30)
    data = [random_datum(128) for _ in range(ROW // 128)]
    with attack.service(attack.keys[0]) as service:
        training, overflown = _lora(service), _lora(service)
        attack.go(attack.longest(lambda: overflown.forward_backward(data, "cross_entropy").result()))
        while attack.on:
            attack.attempt(training.forward_backward([wrong], "cross_entropy").result)
            attack.attempt(training.optim_step(ADAM).result)
            attack.attempt(overflown.optim_step(huge).result)
            attack.attempt(overflown.forward_backward(data, "cross_entropy").result)


def too_long(attack: Attack) -> None:
    """Send data and prompts longer than the context."""
    data = [random_datum(CONTEXT + 1000)] * 8
    with attack.service(attack.keys[0]) as service:
        training = _lora(service)
        sampler = service.create_sampling_client(base_model="tiny").result()
        attack.go(attack.longest(lambda: training.forward_backward(data, "cross_entropy").result()))
        while attack.on:
            attack.attempt(training.forward_backward(data, "cross_entropy").result)
            attack.attempt(training.optim_step(ADAM).result)
            attack.attempt(sampler.sample(random_prompt(CONTEXT + 1000), 1, SAMPLING).result)


def spin(attack: Attack) -> None:
    """Send a custom loss that does as much as its limits allow for each datum."""
    data = [random_datum(128) for _ in range(8)]
    with attack.service(attack.keys[0]) as service:
        loss = service.create_custom_loss(_spinning, {"logprobs": 1}).result()
        training = _lora(service)
        attack.go(attack.longest(lambda: training.forward_backward_custom(data, loss).result()))
        while attack.on:
            attack.attempt(training.forward_backward_custom(data, loss).result)


def _spinning(logprobs: "torch.Tensor") -> tuple["torch.Tensor", dict[str, "torch.Tensor"]]:
    large = logprobs.repeat(8000)
    for _ in range(12):
        large = large.sin()
    return large.mean(), {}


# Connections


def half_open(attack: Attack) -> None:
    """Hold connections without a request, with half a head, and with half a body."""
    head = _head(attack.keys[0])
    starts = (b"", head[:40], head + bytes(PIECE + 1000))
    attack.go()
    held: dict[int, socket.socket] = {}
    while attack.on:
        for number in range(CONNECTIONS):
            if number not in held or _closed(held[number]):
                attack.outcomes["opened"] += 1
                held[number] = _connected(attack.url, starts[number % 3])
        attack.pause(1.0)


def _head(key: str) -> bytes:
    return (
        f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n"
        f"Content-Type: application/x-protobuf\r\nContent-Length: {UPLOAD}\r\n\r\n"
    ).encode()


def _connected(url: str, start: bytes) -> socket.socket:
    """Connect and send what the server takes at once."""
    address = urlsplit(url)
    assert address.hostname is not None
    connection = socket.create_connection((address.hostname, address.port or 80))
    connection.setblocking(False)
    with suppress(OSError):
        connection.send(start)
    return connection


def _closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    connection.close()
    return True


def killed(attack: Attack) -> None:
    """Kill a process that uploads large bodies, and start another one."""
    attack.go()
    while attack.on:
        child = os.fork()
        if not child:
            with suppress(OSError):
                _upload(attack)
            os._exit(0)
        attack.pause(UPLOAD_S)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        attack.outcomes["killed"] += 1


def _upload(attack: Attack) -> None:
    """Send 10 MB/s over several connections, without end."""
    connections = [_connected(attack.url, _head(attack.keys[0])) for _ in range(UPLOADS)]
    while True:
        for connection in connections:
            with suppress(BlockingIOError):
                connection.send(bytes(PIECE))
        time.sleep(UPLOADS * PIECE / 10e6)


ATTACKS: dict[str, Callable[[Attack], None]] = {
    "train": train,
    "sample": sample,
    "completions": completions,
    "bodies": bodies,
    "long_rows": long_rows,
    "not_a_number": not_a_number,
    "too_long": too_long,
    "spin": spin,
    "half_open": half_open,
    "killed": killed,
}


class Attacker:
    """Process of an attack, prepared when entered. `unit_s`: the longest of three units, once it ended."""

    def __init__(self, attack: str, url: str, keys: Sequence[str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_attack, args=(attack, url, keys, theirs), daemon=True)
        self.unit_s = 0.0

    def __enter__(self) -> "Attacker":
        self._process.start()
        self._hear(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def go(self) -> None:
        self._pipe.send(None)

    def stop(self) -> dict[str, int]:
        """Return how often each answer came; none if the attacker died or does not end."""
        try:
            self._pipe.send(None)
            outcomes, self.unit_s = self._hear(STOP_S)
        except (OSError, EOFError):
            return {}
        return dict(outcomes)

    def _hear(self, within_s: float) -> Any:
        if not self._pipe.poll(within_s):
            raise TimeoutError(f"an attacker said nothing for {within_s:g} s")
        return self._pipe.recv()


def _attack(name: str, url: str, keys: Sequence[str], pipe: Connection) -> None:
    logging.getLogger("tinker").setLevel(logging.CRITICAL)  # most of its requests are meant to fail
    attack = Attack(url, keys, pipe)
    ATTACKS[name](attack)
    pipe.send((attack.outcomes, attack.unit_s))
