"""Stuck requests fail at their deadline and say what they waited for; all others go on."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from sqlalchemy import Connection, select, update

from skyrl_tinker.config import Settings, Timeouts
from skyrl_tinker.domain.ids import ModelKey, ModelState, RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine import gaps
from skyrl_tinker.engine.colocation.placement import Placement
from skyrl_tinker.engine.gaps import GAP_S, NOTED_S, QUIET_S
from skyrl_tinker.store import model_records, server_state
from skyrl_tinker.store.database.tables import Future, Session
from skyrl_tinker.store.futures import expected_requests
from skyrl_tinker.store.futures.expected_requests import RETRY_S, Sender
from skyrl_tinker.store.futures.finish import fail_missing
from skyrl_tinker.store.session_records import BEAT_S, MOST_BEATS
from skyrl_tinker.store.store import write_once
from tests.api.support.passes import datum, old_json, protobuf
from tests.api.support.waiting import Waiting, ready_model, submit, waiting
from tests.api.support.world import PROTOBUF, STEP, Json, sample, step
from tests.support.reads import reading
from tests.support.waiting import until

DAY = 86400.0
PROTO = "application/x-protobuf"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"sample_concurrency": 1, "timeouts": Timeouts(long_poll_s=10.0)})


async def server_failure(made: Waiting, request_id: str) -> str:
    answer = await made.api.result(request_id, **PROTOBUF)
    assert answer.json()["category"] == "server"
    return str(answer.json()["error"])


async def parked(made: Waiting, model: str, seq_id: int) -> str:
    """A step that the engine has seen and cannot run."""
    request_id = await submit(made.api, "optim_step", step(model, seq_id))
    await until(lambda: any(s.lowest == seq_id for s in made.driver.requests.lanes.statuses().values()))
    return request_id


def failed_numbers(made: Waiting) -> list[int]:
    """The numbers without a request that are failed, in the store: asked at once, where a client waits."""
    with reading(made.store) as conn:
        missing = select(Future.seq_id).where(Future.kind == RequestKind.MISSING)
        return sorted(conn.scalars(missing))


async def closes(made: Waiting, now: float, quiet_s: float = QUIET_S) -> None:
    """Let so much time pass without a request, from `now` on."""
    for passed_s in (0.0, quiet_s, quiet_s + NOTED_S):
        await made.deadlines.enforce(now + passed_s)


async def test_a_number_that_never_comes_is_a_failed_request_and_its_model_goes_on(made: Waiting) -> None:
    model = await ready_model(made.api)
    await made.api.result(await submit(made.api, "forward_backward", old_json(model, 1)))
    waits = await parked(made, model, 4)
    await closes(made, time.time())
    assert failed_numbers(made) == [2, 3]
    assert "seq 2 of this model never came, though its client sent 4" in await made.api.failure(waits)
    late = [await submit(made.api, "optim_step", step(model, 3)) for _ in range(2)]
    assert late[0] == late[1]
    assert "seq 3 of this model never came" in await made.api.failure(late[0])
    after = await submit(made.api, "optim_step", step(model, 5))
    assert (await made.api.result(after)).json()["metrics"] == STEP["metrics"]
    assert [what for what, _ in made.trainer.ran[ModelKey(1)]] == ["create", "pass", "zero", "step"]


async def test_the_next_engine_knows_that_a_window_has_a_missing_number(settings: Settings) -> None:
    async with waiting(settings) as made:
        model = await ready_model(made.api)
        ran = await submit(made.api, "forward", old_json(model, 2, "forward_input"))
        await until(made.driver.requests.lanes.gaps)
        await closes(made, time.time())
        assert (await made.api.result(ran, **PROTOBUF)).headers["content-type"] == PROTO
    async with waiting(settings) as made:
        stepped = await submit(made.api, "optim_step", step(model, 3))
        assert "seq 1 of this model never came" in await made.api.failure(stepped)
        late = await submit(made.api, "forward_backward", old_json(model, 1))
        assert "seq 1 of this model never came" in await made.api.failure(late)
        after = await submit(made.api, "optim_step", step(model, 4))
        assert (await made.api.result(after)).json()["metrics"] == STEP["metrics"]


async def test_an_engine_that_ends_once_the_failure_is_stored_is_followed_by_one_that_goes_on(
    settings: Settings,
) -> None:
    async with waiting(settings) as made:
        waits = await parked(made, await ready_model(made.api), 2)
        failure = Failure("never came", "user")
    fail = partial(fail_missing, model=ModelKey(1), seq_ids=range(1, 3), failure=lambda _: failure)
    assert write_once(settings.store_url, fail) == [1]
    async with waiting(settings) as made:
        assert "never came" in await made.api.failure(waits)


async def test_the_engine_looks_for_them_by_itself(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaps, "QUIET_S", 0.2)
    async with waiting(settings, deadlines=True) as made:
        waits = await submit(made.api, "optim_step", step(await ready_model(made.api), 2))
        assert "seq 1 of this model never came" in await made.api.failure(waits)


async def test_a_gap_too_large_for_any_client_ends_its_model_alone(made: Waiting) -> None:
    stuck, other = await ready_model(made.api), await ready_model(made.api)
    waits = await parked(made, stuck, gaps.MOST + 2)
    later = await submit(made.api, "optim_step", step(stuck, gaps.MOST + 3))
    await closes(made, time.time())
    assert "seq 1 of this model did not arrive: the server has 4098" in await made.api.failure(waits)
    assert "did not arrive" in await made.api.failure(later)
    await until(lambda: "release" in made.trainer.names())
    assert "did not arrive" in await made.api.failure(await submit(made.api, "optim_step", step(stuck, 1)))
    row = await made.store.read(lambda conn: model_records.by_key(conn, ModelKey(1)))
    assert row.state is ModelState.FAILED, "no later engine takes it up again"
    fine = await submit(made.api, "optim_step", step(other, 1))
    assert (await made.api.result(fine)).json()["metrics"] == STEP["metrics"]


async def stands(made: Waiting, seq_id: int) -> bool:
    """Whether the model still waits for this number."""
    assert not [row for row in await made.api.queued() if row.kind is RequestKind.MISSING]
    return made.driver.requests.lanes.gaps()[ModelKey(1)].seq_ids.start == seq_id


async def test_a_gap_has_its_time_again_after_the_machine_was_suspended(
    made: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    await parked(made, await ready_model(made.api), 2)
    now, wall = time.time(), time.time
    await closes(made, now, GAP_S - NOTED_S - 1)
    asleep_s = 2 * GAP_S
    monkeypatch.setattr(time, "time", lambda: wall() + asleep_s)
    await made.deadlines.enforce(now + asleep_s)
    assert await stands(made, 1)
    await closes(made, now + asleep_s, GAP_S)
    await until(lambda: not made.driver.requests.lanes.gaps())


async def test_a_client_that_is_away_is_waited_for(made: Waiting) -> None:
    model, now = await ready_model(made.api), time.time()
    waits = await parked(made, model, 2)
    later = now + MOST_BEATS * BEAT_S + 1
    await closes(made, later, 890)
    assert await stands(made, 1)
    await closes(made, later + 890, 11)
    assert "seq 1 of this model never came" in await made.api.failure(waits)


async def test_nothing_behind_a_gap_runs_once_its_client_has_finished(made: Waiting) -> None:
    """Hours of passes may wait there, of which nobody will read a result."""
    session = await made.api.session()
    await parked(made, await ready_model(made.api, session), 4)
    await made.api.ok(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    await closes(made, time.time())
    assert failed_numbers(made) == []


async def test_a_call_whose_chunks_still_come_is_waited_for(made: Waiting) -> None:
    """The first chunk comes last."""
    model, now = await ready_model(made.api), time.time()
    lanes = made.driver.requests.lanes
    for seq_ids in (range(1, 3), range(1, 2)):
        await submit(made.api, "forward", old_json(model, seq_ids.stop, "forward_input"))
        await until(lambda: [gap.seq_ids for gap in lanes.gaps().values()], [seq_ids].__eq__)
        await closes(made, now, QUIET_S - 0.1)
        assert await stands(made, 1)
        now += QUIET_S


@pytest.mark.parametrize("sent", ["json", "protobuf"])
async def test_a_request_that_is_on_its_way_is_waited_for(made: Waiting, sent: str) -> None:
    """Its body has begun to arrive at an API process, which the engine hears from the store alone."""
    model = await ready_model(made.api)
    waits = await parked(made, model, 2)
    content, kind = _body(model, sent)
    rest = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield content[:100]
        await rest.wait()
        yield content[100:]

    headers = {"Content-Type": kind}
    sending = asyncio.create_task(made.api.http.post("forward_backward", content=body(), headers=headers))
    await until(lambda: _tells(made))
    now = time.time()
    await closes(made, now)
    assert await stands(made, 1)
    rest.set()
    answer = await sending
    assert answer.status_code == 200, answer.text
    assert (await made.api.result(waits)).json()["metrics"] == STEP["metrics"]


@pytest.mark.parametrize("part", ["model first", "model last"])
async def test_a_request_of_another_model_that_is_on_its_way_is_not_waited_for(
    made: Waiting, part: str
) -> None:
    """It is of the same owner: without keys all clients are one."""
    waits = await parked(made, await ready_model(made.api), 2)
    other = await ready_model(made.api)
    body = old_json(other, 1)
    content = json.dumps(dict(reversed(body.items())) if part == "model first" else body).encode()
    rest = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield content[:-1]
        await rest.wait()
        yield content[-1:]

    headers = {"Content-Type": "application/json"}
    sending = asyncio.create_task(made.api.http.post("forward_backward", content=parts(), headers=headers))
    await until(lambda: _tells(made))
    await closes(made, time.time())
    assert "seq 1 of this model never came" in await made.api.failure(waits)
    rest.set()
    assert (await sending).status_code == 200


async def test_requests_of_unknown_models_do_not_hold_a_gap_for_ever(made: Waiting) -> None:
    waits, now = await parked(made, await ready_model(made.api), 2), time.time()
    unknown = {Sender(None, None): now + DAY}
    await made.store.write(partial(expected_requests.note, until=unknown))
    await closes(made, now, 890)
    assert await stands(made, 1)
    await closes(made, now + 890, 11)
    assert "seq 1 of this model never came" in await made.api.failure(waits)


async def test_a_request_that_was_lost_is_waited_for_until_it_is_certainly_not_sent_again(
    made: Waiting,
) -> None:
    model = await ready_model(made.api)
    waits = await parked(made, model, 2)

    async def body() -> AsyncIterator[bytes]:
        yield protobuf(model, 1, datum([1, 2]))[:60]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await made.api.http.post("forward_backward", content=body(), headers={"Content-Type": PROTO})
    await until(lambda: _tells(made))
    lost, session = time.time(), model.partition(":")[0]
    await made.store.write(lambda conn: _beat(conn, session, lost + RETRY_S))
    await closes(made, lost, RETRY_S - 5)
    assert await stands(made, 1)
    await closes(made, lost + RETRY_S)
    assert "seq 1 of this model never came" in await made.api.failure(waits)


async def test_what_clients_sent_while_the_api_was_away_is_waited_for(made: Waiting) -> None:
    model = await ready_model(made.api)
    await parked(made, model, 2)
    await made.store.write(expected_requests.note_outage)
    await closes(made, time.time())
    assert await stands(made, 1)


async def test_no_other_number_of_a_session_is_waited_for(made: Waiting) -> None:
    session = await made.api.session()
    made.samplers.go_on.set()
    await ready_model(made.api, session)
    model = await made.api.model(session, 7)
    assert (await made.api.result(await submit(made.api, "optim_step", step(model, 1)))).status_code == 200
    sampler = await made.api.sampler(session, 5)
    drawn = await submit(made.api, "asample", sample(sampler, 9))
    assert (await made.api.result(drawn)).status_code == 200


async def _tells(made: Waiting) -> bool:
    """Whether the API has told the engine of something, once it was asked to."""
    await made.api.services.arrivals.tell(time.time())
    return await made.store.read(lambda conn: bool(server_state.get(conn, server_state.EXPECTED)))


def _body(model: str, sent: str) -> tuple[bytes, str]:
    if sent == "json":
        return json.dumps(old_json(model, 1)).encode(), "application/json"
    return protobuf(model, 1, datum([1, 2])), PROTO


def _beat(conn: Connection, session: str, now: float) -> None:
    conn.execute(update(Session).where(Session.session_id == session).values(last_heartbeat_at=now))


async def test_a_pass_that_has_begun_may_still_take_effect_so_its_window_fails(made: Waiting) -> None:
    model = await ready_model(made.api)
    made.trainer.go_on.clear()
    backward = await submit(made.api, "forward_backward", old_json(model, 1))
    await until(lambda: "pass" in made.trainer.names())
    await made.deadlines.enforce(time.time() + DAY + 1)
    text = await server_failure(made, backward)
    assert "was not done within 86400 s (setting timeouts.request_s): it has begun" in text
    stepped = await submit(made.api, "optim_step", step(model, 2))
    made.trainer.go_on.set()
    assert "the gradients of its window are cleared" in await made.api.failure(stepped)
    again = await submit(made.api, "optim_step", step(model, 3))
    assert (await made.api.result(again)).json()["metrics"] == STEP["metrics"]


async def test_an_unload_waits_for_others_and_is_never_late(made: Waiting) -> None:
    model = await ready_model(made.api)
    made.trainer.go_on.clear()
    await submit(made.api, "forward_backward", old_json(model, 1))
    await until(lambda: "pass" in made.trainer.names())
    body = {"model_id": model, "type": "unload_model"}
    unloading = await submit(made.api, "unload_model", body)
    await until(lambda: RequestKind.UNLOAD_MODEL in {row.kind for row in made.metrics.pending()})
    await made.deadlines.enforce(time.time() + DAY + 1)
    made.trainer.go_on.set()
    assert (await made.api.result(unloading)).json()["model_id"] == model


async def test_one_that_had_no_turn_is_skipped(made: Waiting) -> None:
    busy, waiting_long = await ready_model(made.api), await ready_model(made.api)
    made.trainer.go_on.clear()
    await submit(made.api, "forward_backward", old_json(busy, 1))
    await until(lambda: "pass" in made.trainer.names())
    late = await submit(made.api, "forward", old_json(waiting_long, 1, "forward_input"))
    await until(lambda: bool(made.driver.requests.lanes.statuses()))
    await made.deadlines.enforce(time.time() + DAY + 1)
    assert "it never started on the trainer" in await server_failure(made, late)
    made.trainer.go_on.set()
    after = await submit(made.api, "optim_step", step(waiting_long, 2))
    assert (await made.api.result(after)).json()["metrics"] == STEP["metrics"]
    assert [value for what, value in made.trainer.told if what == "pass"] == [[(ModelKey(1), True)]]


async def test_samples_are_given_up_in_the_sampler_too(made: Waiting) -> None:
    sampler = await made.api.sampler()
    ids = [await submit(made.api, "asample", sample(sampler, number)) for number in range(2)]
    await until(lambda: len(made.samplers.drawn) == 1)
    await until(lambda: made.sampler.queued() + made.sampler.in_flight() == len(ids))
    await made.deadlines.enforce(time.time() + DAY + 1)
    for request_id in ids:
        assert "this sample was not done within 86400 s" in await server_failure(made, request_id)
    assert len(made.samplers.stopped) == 1
    assert (made.sampler.queued(), made.sampler.in_flight()) == (0, 0)


async def test_requests_have_their_time_again_after_the_machine_was_suspended(
    made: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = await made.api.sampler()
    request_id = await submit(made.api, "asample", sample(sampler, 0))
    await until(lambda: len(made.samplers.drawn) == 1)
    now, wall = time.time(), time.time
    await made.deadlines.enforce(now)
    monkeypatch.setattr(time, "time", lambda: wall() + 2 * DAY)
    await made.deadlines.enforce(now + 2 * DAY)
    await made.deadlines.enforce(now + 3 * DAY - 1)
    assert made.samplers.stopped == []
    await made.deadlines.enforce(now + 3 * DAY + 60)
    assert "this sample was not done within 86400 s" in await server_failure(made, request_id)


class Elsewhere(Placement):
    """The trainer has its turn when `mine` is set; `asked` counts the units that wait for it."""

    def __init__(self) -> None:
        self.mine = asyncio.Event()
        self.asked = 0

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        self.asked += 1
        await self.mine.wait()
        self.asked -= 1
        yield


@pytest.mark.parametrize(
    ("path", "more", "ran"),
    [
        ("optim_step", {"adam_params": {"learning_rate": 1e-3}}, ["zero", "step", "step"]),
        ("save_weights", {"path": "a"}, ["step", "step"]),
        ("save_weights_for_sampler", {"path": "a"}, ["step", "step"]),
        ("forward_backward", old_json("", 0), ["pass", "zero", "step"]),  # its batch was made before
    ],
)
async def test_one_whose_time_is_over_just_before_its_turn_has_no_effect_and_ends_no_engine(
    settings: Settings, path: str, more: Json, ran: list[str]
) -> None:
    turn = Elsewhere()
    turn.mine.set()
    async with waiting(settings, placement=turn) as made:
        model = await ready_model(made.api)
        turn.mine.clear()
        late = await submit(made.api, path, {**more, "model_id": model, "seq_id": 1})
        await until(lambda: turn.asked == 1)
        await made.deadlines.enforce(time.time() + DAY + 1)
        assert "it has begun and may still take effect" in await server_failure(made, late)
        turn.mine.set()
        await made.api.result(await submit(made.api, "optim_step", step(model, 2)))
        after = await submit(made.api, "optim_step", step(model, 3))
        assert (await made.api.result(after)).json()["metrics"] == STEP["metrics"]
        assert [what for what, _ in made.trainer.ran[ModelKey(1)]] == ["create", *ran]
