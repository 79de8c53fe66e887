"""OpenAI's requests go to the server of the base model that they name, or of the weights at their path."""

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from skyrl_tinker.domain.ids import ALL_OWNERS, CheckpointKind, OwnerId
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec, Usage
from skyrl_tinker.engine.openai.chat_abilities import ChatAbilities
from skyrl_tinker.engine.openai.openai_call import OpenAICall
from skyrl_tinker.engine.openai.openai_relay import OpenAIRelay
from skyrl_tinker.engine.openai.openai_requests import LONGEST_TOKEN
from skyrl_tinker.engine.openai.openai_routes import OpenAIRoutes
from skyrl_tinker.engine.openai.openai_server import OpenAIServer
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.scheduling.priorities import Priorities
from skyrl_tinker.engine.scheduling.slots import Concurrency
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.protocol.schemas.openai import CompletionRequest, FieldError
from skyrl_tinker.store import checkpoint_records, usage_records, weight_versions
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.store import Store
from tests.engine.support import journal
from tests.engine.support.world import FACTS
from tests.support.scripted_samplers import ScriptedSamplers
from tests.support.waiting import end, until

STUDENT = replace(FACTS, names=("student", "S"))
TEACHER = replace(FACTS, names=("teacher",))
REQUEST = CompletionRequest(model="student", prompt="a")
ARRIVING, TURNS = SimpleNamespace(arriving=nullcontext), SimpleNamespace(turn=lambda *_: nullcontext())
NONE: Any = None


def relay_of(store: Store, samplers: Any, driver: Any) -> OpenAIRelay:
    return OpenAIRelay(store, samplers, NONE, STUDENT.name, driver, Metrics())


def server_of(
    store: Store, samplers: Any = None, driver: Any = None, facts: BaseModelFacts = STUDENT
) -> OpenAIServer:
    relay = relay_of(store, samplers, driver)
    server = OpenAIServer(samplers, NONE, facts, NONE, driver, relay)
    server._abilities = ChatAbilities(frozenset())
    return server


@pytest.fixture
def routes(store: Store) -> OpenAIRoutes:
    servers = [server_of(store, facts=facts) for facts in (STUDENT, TEACHER)]
    return OpenAIRoutes(store, servers, Metrics())


async def saved(store: Store, base_model: str) -> str:
    """Return the path of sampler weights of a base model."""
    model = await journal.ready_model(store)
    key = await journal.key_of(store, model)
    version = await store.write(lambda conn: weight_versions.insert_version(conn, key, "lora", durable=True))
    kind, spec = CheckpointKind.SAMPLER_WEIGHTS, LoraSpec(8, 1)
    new = NewCheckpoint(key, kind, "a", "/nowhere", base_model, spec, 1, version_id=version)
    await store.write(lambda conn: weight_versions.publish_version(conn, version, "/nowhere", 1))
    await store.write(lambda conn: checkpoint_records.add(conn, new, replace=False))
    return f"tinker://{model}/sampler_weights/a"


async def served_by(routes: OpenAIRoutes, model: str) -> tuple[str, bool]:
    """Return the base model of the server that is found, and whether it gets a version of its weights."""
    server, version = await routes.find(model, None)
    return server.facts.name, version is not None


async def test_a_name_or_a_path_finds_its_base_model(routes: OpenAIRoutes, store: Store) -> None:
    for name, base_model in (("student", "student"), ("S", "student"), ("teacher", "teacher")):
        assert await served_by(routes, name) == (base_model, False)
    for base_model in ("student", "teacher"):
        assert await served_by(routes, await saved(store, base_model)) == (base_model, True)


async def test_what_is_not_served_is_refused_with_all_that_is(routes: OpenAIRoutes, store: Store) -> None:
    with pytest.raises(NotFoundError, match=r"no model 'other': expected student, teacher, or a tinker://"):
        await routes.find("other", None)
    with pytest.raises(UserError, match=r"is of base model 'other', expected student, teacher$"):
        await routes.find(await saved(store, "other"), None)


async def test_a_wrong_path_is_named_as_the_model(routes: OpenAIRoutes, store: Store) -> None:
    for path in (
        "tinker://",
        "tinker://x/../y",
        "tinker://x/sampler_weights/..",
        await saved(store, "other"),
    ):
        with pytest.raises(FieldError, match=r"^model: ") as refused:
            await routes.find(path, None)
        assert refused.value.field == "model"


async def test_a_request_waits_for_the_samplers_and_uses_them_until_its_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplers = ScriptedSamplers()
    server = server_of(store, samplers, ARRIVING)
    gate, prepared, go_on = samplers.gate, asyncio.Event(), asyncio.Event()

    async def prepare(*_: object) -> None:
        prepared.set()
        await go_on.wait()
        raise UserError("the prompt is too long")

    monkeypatch.setattr(server, "_prepare", prepare)
    gate.close("they are being started")
    answering = asyncio.create_task(server.answer(NONE, REQUEST, 1, None, None))
    await gate.asked.wait()
    assert (gate.in_use, prepared.is_set()) == (True, False)
    gate.open()
    await prepared.wait()
    assert gate.in_use
    go_on.set()
    with pytest.raises(UserError, match="the prompt is too long"):
        await answering
    assert not gate.in_use


async def test_a_request_that_waits_for_samplers_is_seen_in_the_queue_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplers: Any = ScriptedSamplers()
    driver = SamplerDriver(store, samplers, NONE, Concurrency(1, 1), Metrics())
    server = server_of(store, samplers, driver)
    call = OpenAICall(REQUEST, None, None, [1], {"max_tokens": 1}, NONE)
    monkeypatch.setattr(server, "_prepare", AsyncMock(return_value=call))
    samplers.gate.close("they are being started")
    answering = [asyncio.create_task(server.answer(NONE, REQUEST, 1, None, None)) for _ in range(2)]
    await samplers.gate.asked.wait()
    assert (driver.view().waiting, driver.queued()) == (2, 0)
    answering[0].cancel()
    await asyncio.wait(answering[:1])
    assert driver.view().waiting == 1
    samplers.gate.open()
    await until(driver.queued)
    assert driver.view().waiting == 1
    await end(answering[1])
    assert driver.view().waiting == 0


async def test_a_text_that_no_context_holds_is_refused_also_before_the_samplers_run(store: Store) -> None:
    samplers = ScriptedSamplers()
    server = server_of(store, samplers, ARRIVING)
    samplers.gate.close("they are being started")
    huge = CompletionRequest(model="student", prompt="a" * (LONGEST_TOKEN * STUDENT.context_length + 1))
    with pytest.raises(FieldError, match=r"prompt: \d+ characters, expected at most"):
        await server.answer(NONE, huge, 1, None, None)
    assert not samplers.gate.in_use


async def test_a_request_counts_for_its_owner_in_the_sampler(store: Store) -> None:
    """As a sample does: beside a large request, another owner's comes before the next of the first."""
    relay = relay_of(store, SimpleNamespace(priorities=Priorities()), TURNS)
    first, other = (
        OpenAICall(REQUEST, owner, None, [1000], {"max_tokens": 3000}, NONE) for owner in map(OwnerId, (1, 2))
    )
    async with relay._turn(first) as earliest, relay._turn(first) as next_one, relay._turn(other) as small:
        assert (earliest, next_one, small) == (0, 4000, 0)


async def test_all_sequences_of_a_request_are_behind_small_requests_of_others(store: Store) -> None:
    """The sampler gets one priority for all of them."""
    relay = relay_of(store, SimpleNamespace(priorities=Priorities()), TURNS)
    many = CompletionRequest(model="student", prompt=["a", "a"], n=4)
    wide = OpenAICall(many, OwnerId(1), None, [1000, 1000], {"max_tokens": 3000}, NONE)
    small = OpenAICall(REQUEST, OwnerId(2), None, [3], {"max_tokens": 3}, NONE)
    async with relay._turn(wide) as last, relay._turn(small) as first, relay._turn(small) as second:
        assert (last, first, second) == (26_000 - 26_000 // 8, 0, 6)


async def test_copies_of_a_greedy_choice_are_not_billed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a sample; the client's own answer counts the tokens that it has."""
    relay = relay_of(store, SimpleNamespace(priorities=Priorities()), TURNS)
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    answer = {"choices": [{"index": 0, "text": "a"}], "usage": usage}
    monkeypatch.setattr(relay, "with_retry", AsyncMock(return_value=answer))
    greedy = CompletionRequest(model="student", prompt="a", n=3, temperature=0.0)
    response: Any = await relay.complete(OpenAICall(greedy, None, None, [5], {"max_tokens": 2}, dict))
    await asyncio.gather(*relay._counting)
    assert json.loads(response.body)["usage"]["completion_tokens"] == 6
    (hour,) = await store.read(lambda conn: usage_records.hourly_between(conn, ALL_OWNERS, 0, 1 << 30))
    assert hour.usage == Usage(5, 0, 2)
