"""A long poll that is over says what the request waits for; too many samples are told to come again."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from skyrl_tinker.api.waiting.engine_queues import EVERY_S
from skyrl_tinker.api.waiting.queue_reasons import Reason, queue_reason
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.protocol.queue_views import (
    LaneView,
    QueuesView,
    QueueView,
    SamplingView,
    TokenRates,
    TrainingView,
    queues_from_bytes,
)
from skyrl_tinker.store.futures.cancellation import QueuePosition
from tests.api.support.passes import old_json
from tests.api.support.waiting import Waiting, is_told, ready_model, submit, told, waiting
from tests.api.support.world import BASE, FACTS, sample, step
from tests.support.waiting import until

NOTHING = TrainingView({})
IDLE = {"tiny": NOTHING}
BACKLOG = 4
TEACHER = replace(FACTS, directory="/models/teacher", names=("teacher",), trainable=False)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"sample_concurrency": 1})


@pytest.fixture
async def with_little_room(settings: Settings) -> AsyncIterator[Waiting]:
    little = settings.model_copy(update={"sample_backlog": BACKLOG})
    async with waiting(little, bases=(FACTS, TEACHER)) as world:
        yield world


# Training


async def test_a_gap_is_named(made: Waiting) -> None:
    model = await ready_model(made.api)
    parked = await submit(made.api, "optim_step", step(model, 8))
    await is_told(made.api, parked, "paused_capacity", "waiting for seq 1 of this model (8 has arrived)")


async def test_who_is_ahead_is_counted(made: Waiting) -> None:
    models = [await ready_model(made.api) for _ in range(4)]
    made.trainer.go_on.clear()
    first = await submit(made.api, "forward_backward", old_json(models[0], 1))
    await until(lambda: "pass" in made.trainer.names())
    others = [await submit(made.api, "optim_step", step(model, 1)) for model in models[1:]]
    behind = await submit(made.api, "optim_step", step(models[3], 2))
    assert await told(made.api, first) == ("active", "running")
    await is_told(made.api, others[0], "paused_capacity", "next to run, less than a second")
    await is_told(made.api, others[2], "paused_capacity", "2 tenants ahead, less than a second")
    text = "1 earlier request of this model and 2 tenants ahead, less than a second"
    await is_told(made.api, behind, "paused_capacity", text)
    made.trainer.go_on.set()
    assert (await made.api.result(behind)).status_code == 200


async def test_a_save_that_is_being_written_says_so_and_who_waits_for_it_too(made: Waiting) -> None:
    model = await ready_model(made.api)
    made.trainer.disk.clear()
    saves = [
        await submit(made.api, "save_weights", {"model_id": model, "seq_id": seq_id, "path": f"s{seq_id}"})
        for seq_id in (1, 2)
    ]
    await is_told(made.api, saves[0], "active", "the checkpoint is being written")
    text = "waiting for an earlier save of this model to be written, or a checkpoint to be fetched"
    await is_told(made.api, saves[1], "paused_capacity", text)
    made.trainer.disk.set()
    assert (await made.api.result(saves[1])).status_code == 200


# Sampling


async def test_samples_ahead_are_counted_and_pauses_named(made: Waiting) -> None:
    sampler = await made.api.sampler()
    ids = [await submit(made.api, "asample", sample(sampler, number)) for number in range(3)]
    await is_told(made.api, ids[0], "active", "sampling")
    await is_told(made.api, ids[1], "paused_capacity", "next to be sampled")
    await is_told(made.api, ids[2], "paused_capacity", "1 sample ahead of this one")
    made.samplers.paused = "samplers are updating weights"
    await is_told(made.api, ids[0], "paused_capacity", "samplers are updating weights")


async def test_a_flood_of_samples_keeps_nobody_else_waiting(made: Waiting) -> None:
    flood, other = await made.api.sampler(), await made.api.sampler()
    for number in range(6):
        await submit(made.api, "asample", sample(flood, number))
    late, later = [await submit(made.api, "asample", sample(other, number)) for number in range(2)]
    await is_told(made.api, later, "paused_capacity", "1 sample ahead of this one")
    assert (await told(made.api, late))[0] == "active", "nothing of its session was in flight"


async def test_many_polls_ask_the_engine_once_a_second(made: Waiting) -> None:
    sampler = await made.api.sampler()
    ids = [await submit(made.api, "asample", sample(sampler, number)) for number in range(40)]
    await is_told(made.api, ids[39], "paused_capacity", "38 samples ahead of this one")
    began, looks = time.monotonic(), made.looks
    answers = await asyncio.gather(*(told(made.api, request_id) for request_id in ids))
    assert {state for state, _ in answers} == {"active", "paused_capacity"}
    assert made.looks - looks <= 2 + (time.monotonic() - began) / EVERY_S


async def test_without_the_engine_the_poll_ends_all_the_same(made: Waiting) -> None:
    model = await ready_model(made.api)
    parked = await submit(made.api, "optim_step", step(model, 2))
    await made.gateway.close()
    assert await told(made.api, parked) == ("active", None)


async def test_above_the_backlog_asample_is_to_come_again(with_little_room: Waiting) -> None:
    sampler = await with_little_room.api.sampler()
    accepted, refused = await _fill(with_little_room, sampler)
    assert refused.status_code == 429
    teacher = await with_little_room.api.sampler(base_model="teacher")
    other = await with_little_room.api.post("asample", sample(teacher, 0))
    assert other.status_code == 200, "each base model has a backlog of its own"
    assert int(refused.headers["retry-after"]) >= 1
    waiting = with_little_room.api.services.queues.samples_waiting(BASE)
    repeated = await with_little_room.api.post("asample", sample(sampler, 0))  # as after a lost answer
    assert repeated.status_code == 200, repeated.text
    assert with_little_room.api.services.queues.samples_waiting(BASE) <= waiting
    assert BACKLOG <= 2 * accepted <= 2 * BACKLOG
    found = re.match(
        rf"(\d+) samples of {BASE} are waiting, and the server accepts {BACKLOG} \(setting sample_backlog\)",
        refused.json()["detail"],
    )
    assert found is not None
    assert BACKLOG <= int(found[1]) <= 2 * BACKLOG
    with_little_room.samplers.go_on.set()
    body = sample(sampler, BACKLOG)
    await until(lambda: with_little_room.api.post("asample", body), lambda answer: answer.status_code == 200)


async def test_samples_that_are_done_are_not_counted_when_the_next_one_comes(
    with_little_room: Waiting,
) -> None:
    sampler = await with_little_room.api.sampler()
    await _fill(with_little_room, sampler)
    looks = with_little_room.looks
    await until(lambda: with_little_room.looks > looks + 1)  # the last of them began after all was accepted
    with_little_room.samplers.go_on.set()
    await until(with_little_room.api.queued, lambda rows: not rows)
    # Nobody asks meanwhile.
    await until(
        lambda: with_little_room.api.services.queues.samples_waiting(BASE), lambda waiting: not waiting
    )
    assert (await with_little_room.api.post("asample", sample(sampler, BACKLOG))).status_code == 200


async def _fill(made: Waiting, sampler: str) -> tuple[int, httpx.Response]:
    """Send samples until one is refused; return how many were accepted, and the refusal.

    A look at the engine while samples are accepted may count some of them twice, until the next.
    """
    accepted = 0
    while (answer := await made.api.post("asample", sample(sampler, accepted))).status_code == 200:
        accepted += 1
    return accepted, answer


# What the words depend on


def place(kind: RequestKind, seq_id: int | None = 5, future_id: int = 100) -> QueuePosition:
    return QueuePosition(future_id, kind, "b", 7, seq_id, "tiny")


PASS = RequestKind.FORWARD_BACKWARD
OWN = "earlier requests of this model are running"
LANE = LaneView(next_seq=5, lowest=5, held=False, session_id="b")


@pytest.mark.parametrize(
    ("asked", "training", "text"),
    [
        (place(PASS, 4), TrainingView({7: LANE}), "running"),
        (place(RequestKind.CREATE_MODEL, 0), NOTHING, "the model is being created"),
        (place(RequestKind.LOAD_WEIGHTS, 0), NOTHING, "the model is being created"),
        (place(RequestKind.LOAD_WEIGHTS, 3), NOTHING, "the weights are being loaded"),
        (place(RequestKind.SAVE_WEIGHTS_FOR_SAMPLER), NOTHING, "the weights are being sent to the samplers"),
        (place(RequestKind.UNLOAD_MODEL, None), NOTHING, "waiting for earlier requests of this model"),
        (place(PASS), TrainingView({7: LANE}, ("a", "b"), (3,), "forward", 4.2), "1 tenant ahead, about 8 s"),
        (place(PASS), TrainingView({7: LANE}, ("b",), (3,), "x", 200), "next to run, about 3 min"),
        (place(PASS), TrainingView({7: LANE}, running=(7,)), OWN),
        (place(PASS, 9), TrainingView({7: LANE}, ("b",)), "4 earlier requests of this model ahead"),
    ],
)  # fmt: skip
def test_what_a_training_request_waits_for(asked: QueuePosition, training: TrainingView, text: str) -> None:
    assert queue_reason(asked, QueuesView({"tiny": training}, {})).text == text


def test_a_sample_whose_weights_are_in_storage_that_is_away_waits() -> None:
    view = SamplingView({"b": QueueView((9,), 1)}, waiting=1, away=(5,))
    assert queue_reason(place(RequestKind.SAMPLE, future_id=5), QueuesView(IDLE, {"tiny": view})) == Reason(
        "paused_capacity", "waiting, as the storage of its weights did not answer"
    )
    assert (
        queue_reason(place(RequestKind.SAMPLE, future_id=6), QueuesView(IDLE, {"tiny": view})).text
        == "sampling"
    )


def test_of_very_many_samples_the_engine_tells_every_so_many() -> None:
    queue = QueueView(tuple(range(100, 200, 10)), 95)
    view = SamplingView({"b": queue}, stride=10, waiting=95, per_second=2.0)
    found = queue_reason(place(RequestKind.SAMPLE, future_id=141), QueuesView(IDLE, {"tiny": view}))
    assert found == Reason("paused_capacity", "50 samples ahead of this one, about 26 s")


def test_of_a_session_that_is_not_listed_a_bound_is_told() -> None:
    view = SamplingView({"a": QueueView((9,), 1), "c": QueueView((7,), 1)}, running=(4,), per_second=1.0)
    found = {
        future_id: queue_reason(
            place(RequestKind.SAMPLE, future_id=future_id), QueuesView(IDLE, {"tiny": view})
        ).text
        for future_id in (4, 5)
    }
    assert found == {4: "sampling", 5: "at least 2 samples ahead of this one, about 3 s"}


def test_a_sample_waits_for_the_samplers_of_its_own_base_model() -> None:
    own = SamplingView({"b": QueueView((100,), 1)}, waiting=1, per_second=0.5)
    other = SamplingView({"b": QueueView((1, 2, 3), 3)}, waiting=3, paused="no sampler is running")
    views = QueuesView(IDLE, {"other": other, "tiny": own})
    text = "next to be sampled, about 2 s"
    assert queue_reason(place(RequestKind.SAMPLE), views) == Reason("paused_capacity", text)
    assert queue_reason(place(RequestKind.SAMPLE), QueuesView(IDLE, {"other": other})).text == "sampling"


def test_what_the_engine_tells_is_read_as_it_was_told() -> None:
    training = TrainingView({7: LANE}, ("a", "b"), (3, 7), "forward", 4.2)
    sampling = SamplingView(
        {"b": QueueView((1, 2), 2)}, 1, (9, 8), 2, 3, 0.5, "samplers are updating weights"
    )
    view = QueuesView({"tiny": training}, {"tiny": sampling, "other": SamplingView()}, TokenRates(2.0, 1.0))
    assert queues_from_bytes(view.to_bytes()) == view
