"""retrieve_futures: one long poll for all samples of a client; and the numbers that keep clients apart."""

import asyncio
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from skyrl_tinker.api.api_process import ApiServer
from skyrl_tinker.api.app import create_app
from skyrl_tinker.api.services import Services
from skyrl_tinker.config import Settings, Timeouts
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import RequestKind, SamplingSessionId
from skyrl_tinker.protocol.schemas.session import SdkFlags
from skyrl_tinker.store.doorbell import Doorbell, SocketBell
from skyrl_tinker.store.futures import completions
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store
from tests.api.support.engine import Engine
from tests.api.support.waiting import submit
from tests.api.support.world import FACTS, Json, World, running, sample, sample_output
from tests.support.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[3]
PROTOBUF_TYPE = "application/x-protobuf"
CLONE = 1_000_000_000


def ask(sampler: str, cursor: int = 0, *, clone: int = 0, **more: Any) -> Json:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
    return {"target": target, "prev_cursor": cursor, "retrieved_request_ids": [], **more}


async def finish(world: World, request_id: str) -> None:
    await world.succeed(request_id, PROTOBUF_TYPE, sample_output([7, 8]))


@pytest.mark.parametrize("near", [completions.NEAR, -1])
async def test_what_finished_comes_once_in_the_order_of_the_results(world: World, near: int) -> None:
    world.patch.setattr(completions, "NEAR", near)  # both ways of looking
    sampler, other = await world.sampler(), await world.sampler()
    ids = [await submit(world, "asample", sample(sampler, number)) for number in range(4)]
    await finish(world, await submit(world, "asample", sample(other, 0)))
    await finish(world, ids[2])
    await world.fail(ids[0], "the sampler died")
    first = await world.ok("retrieve_futures", ask(sampler))
    assert [each["request_id"] for each in first["completions"]] == [ids[2], ids[0]]
    done, failed = first["completions"]
    assert done["state"] == "finished"
    assert done["response_payload_uncompressed_size"] == len(sample_output([7, 8]))
    assert failed == {"state": "failed", "request_id": ids[0], "response_payload_uncompressed_size": None}
    await finish(world, ids[1])
    then = await world.ok("retrieve_futures", ask(sampler, first["cursor"]))
    assert [each["request_id"] for each in then["completions"]] == [ids[1]]
    assert await world.ok("retrieve_futures", ask(sampler)) != first  # nothing was forgotten
    assert (await world.retrieve(ids[2])).status_code == 200


async def test_clones_hear_of_their_own_samples(world: World) -> None:
    sampler = await world.sampler()
    numbers = (0, CLONE, 2 * CLONE - 1, 2 * CLONE)
    ids = [await submit(world, "asample", sample(sampler, number)) for number in numbers]
    for request_id in ids:
        await finish(world, request_id)
    heard = [
        (await world.ok("retrieve_futures", ask(sampler, clone=clone)))["completions"] for clone in range(3)
    ]
    assert [[each["request_id"] for each in one] for one in heard] == [ids[:1], ids[1:3], ids[3:]]


@pytest.fixture
async def patient(settings: Settings) -> AsyncIterator[World]:
    async with running(
        settings.model_copy(update={"timeouts": Timeouts.model_construct(long_poll_s=3600.0)})
    ) as world:
        yield world


async def held(world: World, sampler: str, monkeypatch: pytest.MonkeyPatch) -> "asyncio.Task[Json]":
    """A poll that waits for news."""
    waits, wait = asyncio.Event(), world.services.waiter.wait_for_news

    async def waited(news: asyncio.Event, timeout_s: float) -> bool:
        waits.set()
        return await wait(news, timeout_s)

    monkeypatch.setattr(world.services.waiter, "wait_for_news", waited)
    poll = asyncio.create_task(world.ok("retrieve_futures", ask(sampler)))
    await waits.wait()
    return poll


async def test_the_poll_is_held_until_something_finishes(
    patient: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, other = await patient.sampler(), await patient.sampler()
    request_id = await submit(patient, "asample", sample(sampler, 0))
    strange = await submit(patient, "asample", sample(other, 0))
    polls = [await held(patient, each, monkeypatch) for each in (sampler, other)]
    await finish(patient, strange)
    await asyncio.wait_for(polls[1], PATIENCE_S)
    assert not polls[0].done()
    await finish(patient, request_id)
    found = await asyncio.wait_for(polls[0], PATIENCE_S)
    assert [each["request_id"] for each in found["completions"]] == [request_id]


async def test_a_poll_reads_again_only_when_a_sample_of_its_session_finished(
    patient: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousand clients each result would have a thousand polls read the journal."""
    reads, read = Counter[str](), completions.finished_since

    def counted(conn: Connection, sampling_session_id: SamplingSessionId, clone: int, after: int) -> Any:
        reads[sampling_session_id] += 1
        return read(conn, sampling_session_id, clone, after)

    monkeypatch.setattr(completions, "finished_since", counted)
    sampler, other = await patient.sampler(), await patient.sampler()
    ours = await submit(patient, "asample", sample(sampler, 0))
    theirs = [await submit(patient, "asample", sample(other, number)) for number in range(3)]
    poll = await held(patient, sampler, monkeypatch)
    for request_id in theirs:
        await finish(patient, request_id)
        await until(lambda announced=request_id: announced in patient.services.waiter._announced)  # type: ignore[misc]
    await finish(patient, ours)
    await asyncio.wait_for(poll, PATIENCE_S)
    assert reads[sampler] == 2


async def test_without_news_the_cursor_stays_and_the_time_is_kept(world: World) -> None:
    """A cursor that moved on would have the SDK acknowledge it without a pause."""
    sampler, other = await world.sampler(), await world.sampler()
    await finish(world, await submit(world, "asample", sample(other, 0)))
    began = time.monotonic()
    assert await world.ok("retrieve_futures", ask(sampler, 3)) == {"completions": [], "cursor": 3}
    assert time.monotonic() - began >= world.settings.timeouts.long_poll_s * 0.95


async def test_an_acknowledgement_is_answered_at_once_and_so_are_all_at_shutdown(
    patient: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = await patient.sampler()
    done = {"timeout": 0.0, "retrieved_request_ids": ["a", "b"]}
    answer = await asyncio.wait_for(patient.ok("retrieve_futures", ask(sampler, 5, **done)), PATIENCE_S)
    assert answer == {"completions": [], "cursor": 5}
    poll = await held(patient, sampler, monkeypatch)
    patient.services.waiter.stop()
    assert (await asyncio.wait_for(poll, PATIENCE_S))["completions"] == []


async def test_an_unknown_sampling_session_is_404(world: World) -> None:
    for path, body in (
        ("retrieve_futures", ask("nobody")),
        ("join_sampling_session", {"sampling_session_id": "nobody"}),
    ):
        answer = await world.post(path, body)
        assert (answer.status_code, answer.json()) == (
            404,
            {"detail": "not found: no sampling session nobody"},
        )


async def test_nobody_joins_as_somebody_else_also_after_a_restart(settings: Settings) -> None:
    async with running(settings) as world:
        sampler, other = await world.sampler(), await world.sampler()
        body = {"sampling_session_id": sampler, "type": "join_sampling_session"}
        answers = await asyncio.gather(*(world.ok("join_sampling_session", body) for _ in range(5)))
        assert sorted(answer["client_counter"] for answer in answers) == [1, 2, 3, 4, 5]
        assert (await world.ok("join_sampling_session", {"sampling_session_id": other}))[
            "client_counter"
        ] == 1
    async with running(settings) as world:
        assert (await world.ok("join_sampling_session", body))["client_counter"] == 6


async def test_whose_session_is_finished_is_told_so(world: World) -> None:
    session = await world.session()
    sampler = await world.sampler(session)
    await world.ok(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    assert (await world.post("join_sampling_session", {"sampling_session_id": sampler})).status_code == 410


class Held(Engine):
    """Answers no sample before all `count` have come."""

    def __init__(self, store: Store, bell: Doorbell, count: int) -> None:
        super().__init__(store, bell)
        self.held: list[QueuedRow] = []
        self.count = count
        self.go_on = asyncio.Event()

    async def _answer(self, row: QueuedRow) -> None:
        if row.kind is not RequestKind.SAMPLE:
            await super()._answer(row)
            return
        self.held.append(row)
        if len(self.held) == self.count:
            await self.go_on.wait()
            for each in self.held:
                await super()._answer(each)


@pytest.mark.parametrize("together", [True, False])
async def test_the_sdk_waits_for_many_samples_on_one_connection(settings: Settings, together: bool) -> None:
    flags = SdkFlags(sample_use_retrieve_futures=together)
    settings = settings.model_copy(update={"sdk": flags, "timeouts": Timeouts()})
    store = Store.open(settings.store_url)
    bells = SocketBell.bind(settings.root, "api"), SocketBell.bind(settings.root, "engine")
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(settings, store, Bases((FACTS,)), bells[0])
    server = ApiServer(app)
    engine = Held(store, bells[1], 60)
    tasks = [asyncio.create_task(server.serve([listener])), asyncio.create_task(engine.run())]
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await until(lambda: server.started)
    user = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.api.support.sdk_scenarios", url, "sample_sixty"),
        cwd=ROOT,
        env={**os.environ, "TINKER_API_KEY": "tml-test"},
    )
    await until(lambda: _held(engine, app.state.services, 0 if together else 60))
    engine.go_on.set()
    assert await asyncio.wait_for(user.wait(), PATIENCE_S) == 0
    server.request_stop()
    await tasks[0]
    tasks[1].cancel()
    await asyncio.wait(tasks)
    for bell in bells:
        bell.close()
    await store.close()


def _held(engine: Held, services: Services, polls: int) -> bool:
    return len(engine.held) == engine.count and services.waiter.waiting == polls
