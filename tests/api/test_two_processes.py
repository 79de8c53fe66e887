"""Two API processes on one database: who sends everything to both, however often, has it run once."""

import asyncio
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx
import pytest

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import ModelId
from tests.api.support.passes import datum, protobuf
from tests.api.support.whole import Whole, whole
from tests.api.support.world import BASE, Json, sample, step, write_facts
from tests.engine.support import journal
from tests.support.scripted_trainer import Ran
from tests.support.waiting import until

MODELS, REQUESTS, SAMPLES = 2, 20, 20


@dataclass
class Process:
    """An API process that can be killed and started again at its address."""

    settings: Settings
    listener: socket.socket
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        file, fd = self.settings.root / "settings.json", self.listener.fileno()
        file.write_text(self.settings.model_dump_json())
        command = [sys.executable, "-m", "skyrl_tinker.api.api_process", str(file), str(fd)]
        self.process = subprocess.Popen(command, pass_fds=[fd])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}/api/v1/"


@pytest.fixture
def processes(settings: Settings) -> Iterator[list[Process]]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        started = [Process(settings, listener) for listener in listeners]
        yield started
        for each in started:
            each.kill()


@pytest.fixture
async def server(settings: Settings, processes: list[Process]) -> AsyncIterator[Whole]:
    async with whole(settings, apis=0) as made:
        await write_facts(made.engine.store)
        yield made


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30) as made:
        yield made


async def ask(http: httpx.AsyncClient, url: str, path: str, body: Json | bytes) -> Json:
    """Repeat until there is an answer, as the SDK does."""
    answer = await until(lambda: _answer(http, url + path, body), lambda answer: answer is not None)
    assert answer is not None
    assert answer.status_code == 200, answer.text
    value: Json = answer.json()
    return value


async def _answer(http: httpx.AsyncClient, url: str, body: Json | bytes) -> httpx.Response | None:
    kind = {"Content-Type": "application/x-protobuf"}
    try:
        if isinstance(body, bytes):
            return await http.post(url, content=body, headers=kind)
        return await http.post(url, json=body)
    except httpx.TransportError:
        return None


def training(model: str, seq_id: int) -> tuple[str, Json | bytes]:
    """Passes, a step after every third, an ephemeral save after every tenth."""
    if seq_id % 10 == 0:
        body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": random.randrange(10**6)}
        return "save_weights_for_sampler", body
    if seq_id % 3 == 0:
        return "optim_step", step(model, seq_id, learning_rate=seq_id / 1000)
    return "forward_backward", protobuf(model, seq_id, datum([seq_id, 2, 3]))


def expected(seq_id: int) -> Ran:
    if seq_id % 10 == 0:
        return "publish", None
    if seq_id % 3 == 0:
        return "step", seq_id
    return "pass", (seq_id, True, [[seq_id, 2, 3]])


async def ran(server: Whole, model: str) -> list[Ran]:
    return server.engine.trainer.ran[await journal.key_of(server.engine.store, ModelId(model))]


async def done(http: httpx.AsyncClient, url: str, request: str) -> bytes:
    while True:
        answer = await http.post(
            url + "retrieve_future",
            json={"request_id": request},
            headers={"Accept": "application/x-protobuf"},
        )
        if answer.status_code != 408:
            assert answer.status_code == 200, answer.text
            assert b'"error"' not in answer.content
            return answer.content


async def test_duplicates_racing_at_two_processes_of_which_one_is_killed_run_once_and_in_order(
    server: Whole, processes: list[Process], http: httpx.AsyncClient
) -> None:
    random.seed(5)
    urls = [each.url for each in processes]
    session = (await ask(http, urls[0], "create_session", {"sdk_version": "0.38.0"}))["session_id"]
    births: list[tuple[str, Json | bytes]] = [
        (
            "create_model",
            {"session_id": session, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": 8}},
        )
        for number in range(MODELS)
    ]
    births.append(
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE})
    )
    twice = [await asyncio.gather(*(ask(http, url, *birth) for url in urls)) for birth in births]
    assert all(one == other for one, other in twice)
    names = [one["model_id"] for one, _ in twice[:MODELS]]
    sampler = twice[-1][0]["sampling_session_id"]

    wanted = [training(model, seq_id) for model in names for seq_id in range(1, REQUESTS + 1)]
    wanted += [("asample", sample(sampler, seq_id, num_samples=2)) for seq_id in range(SAMPLES)]
    sent = [(number, url) for number in range(len(wanted)) for url in urls * 2]
    random.shuffle(sent)
    asking = [asyncio.create_task(ask(http, url, *wanted[number])) for number, url in sent]
    await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    processes[1].kill()
    processes[1].start()
    answers = await asyncio.gather(*asking)
    given: list[set[str]] = [set() for _ in wanted]
    for (number, _), answer in zip(sent, answers, strict=True):
        given[number].add(str(answer))
    assert [len(each) for each in given] == [1] * len(wanted)
    for place, request in enumerate({answer["request_id"] for answer in answers}):
        await done(http, urls[place % 2], request)
    for model in names:
        assert await ran(server, model) == [("create", 8), *map(expected, range(1, REQUESTS + 1))]
    assert len(server.engine.samplers.drawn) == SAMPLES
