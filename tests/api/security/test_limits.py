"""Limits of one API key: refused with the limit's name and both numbers, and nobody else is."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy.exc import OperationalError

from skyrl_tinker.api.middleware import request_rate
from skyrl_tinker.api.middleware.request_rate import RequestRates
from skyrl_tinker.api.middleware.route_traits import TRAITS, Trait
from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.api.waiting import kept_value
from skyrl_tinker.api.waiting.key_backlogs import KeyBacklogs
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import CheckpointKind, OwnerId
from skyrl_tinker.domain.state_size import state_bytes
from skyrl_tinker.domain.units import GB
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import OverloadedError
from skyrl_tinker.protocol.validation.key_limits import UNLIMITED, KeyLimits
from skyrl_tinker.store import api_keys
from skyrl_tinker.store.cluster import token_buckets
from skyrl_tinker.store.reports import holdings
from skyrl_tinker.store.store import Store
from tests.api.support.users import new_user, speak_as
from tests.api.support.world import BASE, FACTS, World, running, sample, step
from tests.support.postgres import Postgres

SESSION = {"sdk_version": "0.38.0"}


async def limited(world: World, **limits: Any) -> str:
    """Speak as alice, who has these limits and no others."""
    key = await new_user(world, "alice")
    await limit(world, **limits)
    speak_as(world, key)
    return key


async def limit(world: World, **limits: Any) -> None:
    await world.store.write(lambda conn: api_keys.limit(conn, "alice", limits))
    await world.services.keys.refresh()


async def refused(world: World, path: str, body: dict[str, Any], status: int = 400) -> str:
    answer = await world.post(path, body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-length"] == str(len(answer.content))
    return str(answer.json()["detail"])


def test_no_limit_counts_by_default_but_those_of_sizes() -> None:
    limits = KeyLimits(models=3)
    assert limits.filled(several=False) == KeyLimits(models=3, metadata_kb=256, stop_kb=64)
    shared = limits.filled(several=True)
    assert shared == KeyLimits(models=3, sessions=1000, backlog=10_000, metadata_kb=16, stop_kb=64)
    assert KeyLimits(sessions=5000).filled(several=True).sessions == 5000
    assert limits.overridden({"models": None, "sessions": 2, "gone": 1}).sessions == 2


async def test_limits_are_finite_while_several_keys_share_the_server(world: World) -> None:
    speak_as(world, await new_user(world, "alice"))
    large = {**SESSION, "user_metadata": {"a": "x" * 20_000}}
    await world.ok("create_session", large)
    bob = await new_user(world, "bob")
    assert "expected at most 16 for one API key" in await refused(world, "create_session", large)
    await limit(world, metadata_kb=None)
    await world.ok("create_session", large)
    speak_as(world, bob)
    assert "expected at most 16 for one API key" in await refused(world, "create_session", large)
    await world.store.write(lambda conn: api_keys.revoke(conn, "alice"))
    await world.services.keys.refresh()
    await world.ok("create_session", large)


async def test_limits_of_a_key_win_over_the_settings_and_go_back_to_them(settings: Settings) -> None:
    async with running(settings.model_copy(update={"keys": KeyLimits(sessions=1)})) as world:
        await world.session()
        assert "keys.sessions: found 1 open sessions, expected at most 1" in await refused(
            world, "create_session", SESSION
        )
        await limited(world, sessions=2)
        await world.session()
        await world.session()
        assert "found 2 open sessions, expected at most 2" in await refused(world, "create_session", SESSION)
        await limit(world, sessions=api_keys.DEFAULT)
        assert "found 2 open sessions, expected at most 1" in await refused(world, "create_session", SESSION)
        await limit(world, sessions=None)
        await world.session()


async def test_a_finished_session_makes_room_and_others_are_not_counted(world: World) -> None:
    await world.session()
    await limited(world, sessions=1)
    session = await world.session()
    assert f"skyrl-tinker end {session}" in await refused(world, "create_session", SESSION)
    await world.ok(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    await world.session()
    speak_as(world, await new_user(world, "bob"))
    for _ in range(3):
        await world.session()


async def test_models_above_the_limit_are_refused_and_released_ones_make_room(world: World) -> None:
    await limited(world, models=1)
    session = await world.session()
    model = await world.model(session)
    body = {"session_id": session, "model_seq_id": 1, "base_model": BASE, "lora_config": {"rank": 8}}
    said = await refused(world, "create_model", body)
    assert said.startswith("keys.models: found 1 models in training, expected at most 1 for one API key")
    assert await world.model(session) == model  # a repetition is no new one
    path = await world.checkpoint(model, CheckpointKind.WEIGHTS, "a")
    again = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
    assert "keys.models" in await refused(world, "load_weights", again)
    assert [row.kind for row in await world.queued()] == ["create_model"]
    await limit(world, models=2)
    await world.ok("create_model", body)


async def test_the_state_of_all_models_has_a_size(world: World) -> None:
    one = state_bytes(world.services.bases.first, LoraSpec(8, 0), "adamw") / GB
    assert one > 0
    await limited(world, resident_gb=2.5 * one)
    session = await world.session()
    for number in range(2):
        await world.model(session, number)
    body = {"session_id": session, "model_seq_id": 2, "base_model": BASE, "lora_config": {"rank": 8}}
    said = await refused(world, "create_model", body)
    assert said.startswith(
        f"keys.resident_gb: found {3 * one:.6g} GB of model state with this model, expected"
    )
    assert f"expected at most {2.5 * one:.6g} for one API key" in said
    await world.ok("create_model", {**body, "lora_config": {"rank": 4}})


async def test_models_of_all_base_models_count_together(settings: Settings) -> None:
    """Each with the bytes of its own base model."""
    wide = replace(FACTS, directory="/models/wide", names=("wide",), hidden_size=512)
    one, other = (state_bytes(facts, LoraSpec(8, 0), "adamw") / GB for facts in (FACTS, wide))
    assert other > 2 * one
    async with running(settings, FACTS, wide) as world:
        await limited(world, models=2, resident_gb=one + other)
        session = await world.session()
        await world.model(session)
        await world.model(session, 1, base_model="wide")
        body = {"session_id": session, "model_seq_id": 2, "lora_config": {"rank": 8}}
        for name in (BASE, "wide"):
            said = await refused(world, "create_model", {**body, "base_model": name})
            assert said.startswith("keys.models: found 2 models in training, expected at most 2")
        await limit(world, models=None)
        for name, size in ((BASE, one), ("wide", other)):
            said = await refused(world, "create_model", {**body, "base_model": name})
            assert said.startswith(f"keys.resident_gb: found {one + other + size:.6g} GB of model state")


async def test_a_save_above_the_stored_bytes_fails_and_takes_its_seq_id(world: World) -> None:
    await limited(world, stored_gb=1e-8)
    model = await world.model()
    path = await world.checkpoint(model, CheckpointKind.WEIGHTS, "a", size_bytes=10)
    body = {"model_id": model, "seq_id": 1, "path": "b"}
    said = await world.failure((await world.ok("save_weights", body))["request_id"])
    assert said.startswith("keys.stored_gb: found 1e-08 GB of checkpoints, expected at most 1e-08")
    copied = {"source_path": path, "destination_project_id": "p"}
    assert "keys.stored_gb: found 2e-08 GB" in await refused(world, "copy_weights", copied)
    await world.ok("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0})
    await world.http.delete(f"training_runs/{model}/checkpoints/weights/a")
    await world.ok("save_weights", {"model_id": model, "seq_id": 3, "path": "b"})
    assert [row.seq_id for row in await world.queued()] == [0, 1, 2, 3]
    assert (await world.failure((await world.ok("save_weights", body))["request_id"])) == said


async def test_metadata_has_a_size(world: World) -> None:
    await limited(world, metadata_kb=1)
    large = {"user_metadata": {"a": "x" * 2000}}
    for path, body in (
        ("create_session", {**SESSION, **large}),
        ("create_session", {**SESSION, "tags": ["x" * 1100]}),
        ("create_session", {**SESSION, "sdk_version": "x" * 1100}),
        (
            "create_model",
            {"session_id": await world.session(), "model_seq_id": 0, "base_model": BASE, **large},
        ),
    ):
        said = await refused(world, path, body)
        assert said.startswith("keys.metadata_kb: found "), said
        assert "KB of metadata, expected at most 1 for one API key" in said
    model = await world.model(user_metadata={"a": "x" * 900})
    accepted = await world.ok("save_weights", {"model_id": model, "seq_id": 1, "path": "a", **large})
    assert (await world.failure(accepted["request_id"])).startswith("keys.metadata_kb: found ")


async def test_stop_strings_have_a_size(world: World) -> None:
    await limited(world, stop_kb=0.01)
    sampler = await world.sampler()
    for stop in ("é" * 6, ["aaaaaa", "bbbbbb"]):
        body = sample(sampler, 0, sampling_params={"max_tokens": 4, "stop": stop})
        said = await refused(world, "asample", body)
        assert "keys.stop_kb: found 0.0117188 KB of stop strings, expected at most 0.01" in said
    await world.ok("asample", sample(sampler, 0, sampling_params={"max_tokens": 4, "stop": [1] * 50}))
    answer = await world.http.post(
        "http://api/oai/api/v1/completions", json={"model": BASE, "prompt": "a", "stop": "x" * 20}
    )
    assert (answer.status_code, "keys.stop_kb" in answer.json()["error"]["message"]) == (400, True)


async def test_a_backlog_is_the_keys_own_and_its_429_says_when_to_come_again(world: World) -> None:
    world.patch.setattr(kept_value, "KEPT_S", 0.0)
    await limited(world, backlog=3)
    session = await world.session()
    model, sampler = await world.model(session), await world.sampler(session)
    first = await world.ok("asample", sample(sampler, 0))
    await world.ok("optim_step", step(model, 1))
    for path, body in (("asample", sample(sampler, 1)), ("optim_step", step(model, 2))):
        answer = await world.post(path, body)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        assert answer.json()["detail"].startswith(
            "keys.backlog: found 3 waiting requests, expected at most 3 of one API key"
        )
    completion = {"model": BASE, "prompt": "a"}
    answer = await world.http.post("http://api/oai/api/v1/completions", json=completion)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert "keys.backlog: found 3" in answer.json()["error"]["message"]
    assert await world.ok("optim_step", step(model, 1))  # a repetition gets its first answer
    assert await world.ok("asample", sample(sampler, 0)) == first
    assert (await world.post("asample", sample(sampler, 0, num_samples=2))).status_code == 422
    key = world.http.headers["X-API-Key"]
    speak_as(world, await new_user(world, "bob"))
    await world.ok("asample", sample(await world.sampler(), 0))
    speak_as(world, key)
    await world.succeed(first["request_id"], "application/json", b"{}")
    await world.ok("asample", sample(sampler, 1))


async def test_a_request_that_others_wait_for_is_taken_above_the_backlog(world: World) -> None:
    """Or it would be refused until the others give up."""
    world.patch.setattr(kept_value, "KEPT_S", 0.0)
    await limited(world, backlog=2)
    model = await world.model()
    await world.ok("optim_step", step(model, 2))
    assert (await world.post("optim_step", step(model, 3))).status_code == 429
    await world.ok("optim_step", step(model, 1))


async def test_a_count_between_two_looks_includes_what_was_accepted(world: World) -> None:
    await limited(world, backlog=3)
    sampler = await world.sampler()
    answers = await asyncio.gather(*(world.post("asample", sample(sampler, number)) for number in range(6)))
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 3


async def test_the_backlogs_of_all_keys_are_counted_together(world: World) -> None:
    """A thousand keys would read all that is pending a thousand times a second."""
    world.patch.setattr(holdings, "pending_requests", counts := Mock(wraps=holdings.pending_requests))
    backlogs = KeyBacklogs(world.store)
    for owner in (1, 2, 3):
        who = Caller(OwnerId(owner), "alice", limits=KeyLimits(backlog=1))
        assert await backlogs.full(who) is None
        assert await backlogs.full(who)
    assert counts.call_count == 1


def caller(rate: float | None, owner: int = 1) -> Caller:
    return Caller(OwnerId(owner), "alice", limits=KeyLimits(requests_per_s=rate))


async def admitted(rates: RequestRates, who: Caller, count: int) -> int:
    taken = 0
    for _ in range(count):
        try:
            await rates.admit(who)
        except OverloadedError:
            continue
        taken += 1
    return taken


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, settings: Settings) -> Iterator[str]:
    if request.param == "sqlite":
        yield settings.store_url
    else:
        server: Postgres = request.getfixturevalue("postgres")
        yield (made := server.new_database())
        server.drop(made)


@dataclass
class Clock:
    """Seconds of the processes and of their database, which pass as a test says."""

    now: float = 1_000_000.0

    def __call__(self, _: object = None) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(token_buckets, "database_time", made)
    return made


@pytest.fixture
async def processes(url: str, settings: Settings, clock: Clock) -> AsyncIterator[list[RequestRates]]:
    """Two, each with a connection of its own, as on two hosts."""
    stores = [Store.open(url, settings.root) for _ in range(2)]
    yield [RequestRates(store, clock) for store in stores]
    for store in stores:
        await store.close()


async def test_all_processes_share_a_rate(
    processes: list[RequestRates], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate is an average over ten seconds of one key."""
    first, other = processes
    assert await admitted(first, caller(0.02), 9) == 1
    assert await admitted(other, caller(0.02), 9) == 0
    rate = 7e-3
    monkeypatch.setattr(request_rate, "BURST_S", 10 / rate)
    counts = [await admitted(rates, caller(rate, owner=2), 3) for rates in (first, other, first, other)]
    assert counts == [3, 3, 3, 1]
    assert await admitted(other, caller(rate, owner=3), 20) == 10
    assert await admitted(other, caller(None), 50) == 50
    clock.now += 0.001
    assert await admitted(first, caller(1e6), 50) == 50, "a new rate counts at once"


async def test_a_process_keeps_what_it_took_for_a_while(
    processes: list[RequestRates], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes four of sixteen, three of twelve; the others find the rest."""
    monkeypatch.setattr(request_rate, "SHARE_S", 8 / 1e-3)
    monkeypatch.setattr(request_rate, "BURST_S", 16 / 1e-3)
    first, other = processes
    assert await admitted(first, caller(1e-3), 1) == 1
    assert await admitted(other, caller(1e-3), 30) == 12
    assert await admitted(first, caller(1e-3), 5) == 3
    monkeypatch.setattr(request_rate, "BURST_S", 0.0)
    clock.now += 0.01
    assert await admitted(first, caller(1e3), 1) == 1
    clock.now += 0.01
    assert await admitted(first, caller(1e3), 1) == 1, "another share than the one that has ended"


async def test_what_a_process_took_and_did_not_need_in_time_is_gone(
    processes: list[RequestRates], clock: Clock
) -> None:
    """Or a key would have more than its bucket holds: forty."""
    assert await admitted(processes[0], caller(4.0), 1) == 1
    clock.now += request_rate.BURST_S + 1
    assert await admitted(processes[0], caller(4.0), 50) == 40


async def test_no_process_finds_a_bucket_empty_that_others_hardly_use(url: str, settings: Settings) -> None:
    stores = [Store.open(url, settings.root) for _ in range(12)]
    assert [await admitted(RequestRates(store), caller(50.0), 1) for store in stores] == [1] * 12
    for store in stores:
        await store.close()


async def test_without_the_database_requests_are_not_counted(
    processes: list[RequestRates], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def away(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        raise OperationalError("BEGIN", {}, Exception("no answer"))

    rates = processes[0]
    with monkeypatch.context() as patch:
        patch.setattr(rates._store, "write", away)
        assert await admitted(rates, caller(0.01), 5) == 5
    assert asked == 1
    monkeypatch.setattr(request_rate, "AWAY_S", 0.0)
    assert await admitted(processes[1], caller(0.01), 5) == 1


@pytest.mark.parametrize("rate", [0.05, 2.0])
async def test_a_429_says_when_there_is_a_token_again(
    rate: float, processes: list[RequestRates], clock: Clock
) -> None:
    rates, who = processes[0], caller(rate)
    await admitted(rates, who, 50)
    with pytest.raises(
        OverloadedError, match=r"^keys\.requests_per_s: found more than \d+ requests"
    ) as refusal:
        await rates.admit(who)
    assert 1 <= refusal.value.retry_after_s <= 1 / rate + 1
    clock.now += refusal.value.retry_after_s
    await rates.admit(who)


async def test_requests_above_the_rate_get_a_429_and_those_that_wait_do_not(world: World) -> None:
    world.patch.setattr(request_rate, "BURST_S", 1000.0)
    key = await limited(world, requests_per_s=0.002)
    answers = [await world.http.get("sessions") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[2].headers["retry-after"]) >= 1
    assert "expected at most 0.002 a second from one API key" in answers[2].json()["detail"]
    openai = await world.http.get("http://api/oai/api/v1/models")
    assert (openai.status_code, openai.json()["error"]["type"]) == (429, "server_error")
    waiting = {path for path, trait in TRAITS.items() if Trait.WAITING in trait}
    counted = {"/api/v1/telemetry", "/api/v1/auth/token"}
    assert not waiting & counted
    for path in waiting | counted:
        status = (await world.http.post(f"http://api{path}", json={})).status_code
        assert (status == 429) is (path not in waiting), path
    for path in waiting:
        answer = await world.http.post(f"http://api{path}", content=b" " * 300_000)
        assert answer.status_code == 413, path
    assert (await world.http.get("http://api/healthz")).status_code == 200
    speak_as(world, await new_user(world, "bob"))
    assert (await world.http.get("sessions")).status_code == 200
    speak_as(world, key)


async def test_few_requests_wait_for_the_database(
    processes: list[RequestRates], monkeypatch: pytest.MonkeyPatch
) -> None:
    takes = 0

    def counted(*args: Any, **wanted: Any) -> tuple[int, float]:
        nonlocal takes
        takes += 1
        return take(*args, **wanted)

    take = token_buckets.take
    monkeypatch.setattr(token_buckets, "take", counted)
    who = caller(100.0)
    assert await asyncio.gather(*(processes[0].admit(who) for _ in range(1000)))
    assert takes < 60
    takes = 0
    assert await admitted(processes[0], caller(0.01, owner=2), 100) == 1
    assert takes == 2, "an empty bucket is not asked for each request"


async def test_a_key_without_limits_is_not_counted(world: World) -> None:
    speak_as(world, await new_user(world, "alice"))
    await world.ok("optim_step", step(await world.model(), 1))
    assert UNLIMITED.overridden({}) == UNLIMITED
    assert world.services.backlogs._counted.made is None
    assert not world.services.rates._shares
