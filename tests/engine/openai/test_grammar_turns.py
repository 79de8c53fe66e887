"""A sampler compiles one schema after the other: no owner's schemas keep those of others from it."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.colocation.placement import SEPARATE
from skyrl_tinker.engine.openai.chat_abilities import ChatAbilities
from skyrl_tinker.engine.openai.grammar_turns import GrammarTurns
from skyrl_tinker.engine.openai.openai_relay import OpenAIRelay
from skyrl_tinker.engine.openai.openai_server import OpenAIServer
from skyrl_tinker.engine.sampler.affinity import Affinity
from skyrl_tinker.engine.scheduling.priorities import Priorities
from skyrl_tinker.engine.scheduling.sample_gate import SampleGate
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import RequestGivenUpError, SamplerError
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.inference.vllm.vllm_dialect import VLLM
from skyrl_tinker.protocol.schemas.chats import ChatCompletionRequest
from skyrl_tinker.protocol.schemas.openai import FieldError, parse_openai
from tests.engine.support.world import FACTS

ANN, BOB = OwnerId(1), OwnerId(2)
ANSWER: Any = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
ROUTED = "a"
"""Replica to which the router sends all requests."""


class Replicas:
    """Data plane of replicas that compile in order of arrival, as vLLM, with `workers`: one on two cores.

    Each compile ends by `finish`, and is not ended by a client that gives up. `begun`: (replica, grammar).
    """

    dialect = VLLM

    def __init__(self, workers: int) -> None:
        self.begun: list[tuple[str, str]] = []
        self.bodies: list[Mapping[str, Any]] = []
        self.compiled: set[tuple[str, str]] = set()
        self.wrong: set[str] = set()
        self.given_up: set[str] = set()
        self._workers = defaultdict[str, asyncio.Semaphore](partial(asyncio.Semaphore, workers))
        self._ends = asyncio.Semaphore(0)
        self._compiling: set[asyncio.Task[None]] = set()

    async def tokenize(self, text: object) -> list[int]:
        return [1]

    async def openai(
        self, path: str, body: Mapping[str, Any], *, headers: object = None, server: str | None = None
    ) -> Any:
        self.bodies.append(body)
        if (form := body.get("response_format")) is not None:
            compiling = asyncio.create_task(self._compile(server or ROUTED, form["json_schema"]["name"]))
            self._compiling.add(compiling)
            await asyncio.shield(compiling)
        return dict(ANSWER)

    async def finish(self, count: int = 1) -> None:
        """End compiles, one after the other."""
        for _ in range(count):
            self._ends.release()
            await settled()

    async def _compile(self, replica: str, name: str) -> None:
        async with self._workers[replica]:
            if (replica, name) in self.compiled:
                return
            self.begun.append((replica, name))
            await self._ends.acquire()
            if name in self.wrong:
                raise VLLM.refusal(400, "Grammar error")
            if name in self.given_up:
                raise RequestGivenUpError("Internal server error")
            self.compiled.add((replica, name))


async def settled() -> None:
    """Let all tasks run until each of them waits for something else."""
    for _ in range(100):
        await asyncio.sleep(0)


class World:
    """OpenAI's server of a base model before such replicas."""

    def __init__(self, urls: tuple[str, ...] = (ROUTED,), workers: int = 1) -> None:
        async def once(attempt: Any, *_: object) -> Any:
            return await attempt()

        self.replicas = Replicas(workers)
        self.leased: list[WeightVersion | None] = []

        def lease(version: WeightVersion | None) -> nullcontext[str]:
            self.leased.append(version)
            return nullcontext("tuned")

        leases = SimpleNamespace(open=lease, cache_fields=dict)
        self.samplers: Any = SimpleNamespace(
            gate=SampleGate(),
            fetch=AsyncMock(),
            leases=leases,
            affinity=Affinity(lambda: 1),
            priorities=Priorities(),
        )
        client = SimpleNamespace(data=self.replicas, server_urls=urls)
        self.fleet: Any = SimpleNamespace(
            client=client, generation=1, disaggregated=False, with_retry=once, placement=SEPARATE
        )
        self.turns: list[OwnerId] = []  # that were taken

        def turn(owner: OwnerId, *_: object) -> nullcontext[None]:
            self.turns.append(owner)
            return nullcontext()

        store: Any = SimpleNamespace(write=AsyncMock())
        driver: Any = SimpleNamespace(turn=turn, arriving=nullcontext)
        none: Any = None
        relay = OpenAIRelay(store, self.samplers, self.fleet, FACTS.name, driver, Metrics())
        self.server = OpenAIServer(self.samplers, self.fleet, FACTS, none, driver, relay)
        self.server._abilities = ChatAbilities(frozenset())

    def ask(self, owner: OwnerId, schema: str | None = None, **fields: Any) -> asyncio.Task[Any]:
        """Ask for an answer, to a schema of this name if any."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a long question"}], **fields}
        if schema is not None:
            form = {"name": schema, "schema": {"const": schema}}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        request = parse_openai(ChatCompletionRequest, body)
        none: Any = None
        return asyncio.create_task(self.server.answer(none, request, 1, owner, None))


async def test_a_schema_waits_for_one_of_another_owner_not_for_all() -> None:
    world = World()
    flood = [world.ask(ANN, f"ann-{number}") for number in range(20)]
    await settled()
    other = world.ask(BOB, "bob")
    await settled()
    await world.replicas.finish(3)
    assert world.replicas.begun[:3] == [(ROUTED, "ann-0"), (ROUTED, "bob"), (ROUTED, "ann-1")]
    assert other.done()
    await world.replicas.finish(18)
    assert all(each.done() for each in flood)
    assert len(world.replicas.begun) == 21  # none was compiled again


async def test_what_needs_no_compile_passes_and_what_waits_for_one_has_no_turn() -> None:
    world = World(workers=2)
    world.ask(ANN, "known")
    await settled()
    await world.replicas.finish()
    waiting = [world.ask(ANN, name) for name in ("first", "second", "second")]
    await settled()
    world.turns.clear()
    free = [world.ask(ANN), world.ask(ANN, "known")]
    await settled()
    assert [each.done() for each in (*free, *waiting)] == [True, True, False, False, False]
    assert world.turns == [ANN, ANN]
    await world.replicas.finish(2)
    assert all(each.done() for each in waiting)
    assert [name for _, name in world.replicas.begun] == ["known", "first", "second"]


async def test_it_is_compiled_by_an_answer_of_one_token_on_each_replica_the_first_one_alone() -> None:
    """As it may die of the grammar."""
    world = World(("a", "b", "c"))
    asked = world.ask(ANN, "x", n=4, max_tokens=9)
    await settled()
    assert world.replicas.begun == [("a", "x")]
    await world.replicas.finish()
    assert world.replicas.begun == [("a", "x"), ("b", "x"), ("c", "x")]
    assert not asked.done()
    await world.replicas.finish(2)
    assert asked.done()
    *before, last = world.replicas.bodies
    assert [(each["max_tokens"], each["n"], each["priority"]) for each in before] == [(1, 1, 0)] * 3
    assert [each["messages"][0]["content"] for each in before] == ["a"] * 3
    assert (last["max_tokens"], last["n"], last["messages"][0]["content"]) == (9, 4, "a long question")


async def test_names_and_descriptions_make_no_other_grammar() -> None:
    world = World()
    for name in ("first", "second"):
        schema = {"name": name, "description": f"of the {name}", "schema": {"type": "null"}}
        world.ask(ANN, response_format={"type": "json_schema", "json_schema": schema})
        await settled()
        await world.replicas.finish(2)
    assert [each["max_tokens"] == 1 for each in world.replicas.bodies] == [True, False, False]


async def test_it_is_compiled_under_any_weights_so_that_none_are_swapped_or_held_for_it() -> None:
    world = World()
    asked = world.ask(ANN, "x")
    await settled()
    assert world.leased == []
    await world.replicas.finish()
    assert asked.done()
    assert world.leased == [None]
    assert [each["model"] for each in world.replicas.bodies] == [BASE_MODEL, "tuned"]


async def test_members_that_have_changed_compile_it_again() -> None:
    world = World()
    for generation in (1, 1, 2):
        world.fleet.generation = generation
        world.replicas.compiled.clear()
        world.ask(ANN, "x")
        await settled()
        await world.replicas.finish()
    # The second was not compiled ahead: it was known.
    assert [each["max_tokens"] == 1 for each in world.replicas.bodies] == [True, False, False, True, False]


async def test_who_gives_up_leaves_the_queue_but_a_compile_keeps_its_turn() -> None:
    world = World()
    first, second, third = (world.ask(ANN, name) for name in ("first", "second", "third"))
    await settled()
    first.cancel()
    second.cancel()
    await settled()
    assert first.cancelled()
    assert second.cancelled()
    assert world.replicas.begun == [(ROUTED, "first")]  # the sampler is still at it
    await world.replicas.finish(2)
    assert world.replicas.begun == [(ROUTED, "first"), (ROUTED, "third")]
    assert third.done()
    assert world.ask(ANN, "first")
    await settled()
    assert len(world.replicas.begun) == 2  # a client that asks again finds it compiled


async def test_a_schema_that_fails_is_named_and_frees_the_turn() -> None:
    world = World()
    world.replicas.wrong.add("wrong")
    wrong, right = world.ask(ANN, "wrong"), world.ask(ANN, "right")
    await settled()
    await world.replicas.finish(2)
    assert right.done()
    with pytest.raises(FieldError, match="response_format: the sampler makes no answer that fits it"):
        await wrong


async def test_a_sampler_that_gives_the_token_up_fails_no_request_and_makes_no_grammar_known() -> None:
    """Perhaps the weights that it has just now have diverged, and the request's own have not."""
    world = World(("a", "b"))
    world.replicas.given_up.add("x")
    asked = world.ask(ANN, "x")
    await settled()
    await world.replicas.finish(2)
    assert not asked.done()
    world.replicas.given_up.clear()
    await world.replicas.finish()
    assert asked.done()
    assert asked.exception() is None
    world.replicas.bodies.clear()
    world.ask(ANN, "x")
    await settled()
    await world.replicas.finish()
    assert [each["max_tokens"] == 1 for each in world.replicas.bodies] == [True, True, False]


async def test_the_memory_of_grammars_is_bounded_and_keeps_those_in_use() -> None:
    turns, compiled = GrammarTurns(known=2), []

    async def ask(grammar: str) -> None:
        async def compile_it() -> bool:
            compiled.append(grammar)
            return True

        await turns.compiled(ANN, grammar, compile_it)

    for grammar in ("a", "b", "a", "c", "a", "b"):
        await ask(grammar)
    assert compiled == ["a", "b", "c", "b"]
    assert len(turns._turns._locks) == 0


async def test_a_sampler_that_dies_frees_the_turn() -> None:
    turns = GrammarTurns()

    with pytest.raises(SamplerError):
        await turns.compiled(ANN, "a", AsyncMock(side_effect=SamplerError("it died")))
    await turns.compiled(ANN, "b", AsyncMock(return_value=True))
