"""Requests are checked by the base model of their model or sampling session, on a server that has two."""

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from skyrl_tinker.api import base_limits
from skyrl_tinker.config import BaseOverrides, Settings
from skyrl_tinker.domain.ids import CheckpointKind, ModelId, ModelState, SamplingSessionId
from skyrl_tinker.domain.sampler_abilities import SamplerAbilities
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.store import model_records, sampling_sessions
from tests.api.support.base_facts import VOCABULARY
from tests.api.support.passes import datum, post_pass, protobuf
from tests.api.support.world import BASE, FACTS, PROTOBUF, Json, World, running, sample
from tests.engine.support import journal
from tests.support.reads import reading

SMALL, ALIAS = "org/small", "/models/small"
OTHER = replace(FACTS, directory=ALIAS, names=(SMALL, ALIAS), vocab_size=10, context_length=4)
ONLY_SAMPLED = replace(OTHER, trainable=False)
ONLY_TRAINED = replace(OTHER, sampleable=False)


@pytest.fixture
async def world(settings: Settings) -> AsyncIterator[World]:
    async with running(settings, FACTS, OTHER) as made:
        yield made


async def trained(world: World, model: str, seq_id: int, tokens: list[int]) -> str:
    answer = await post_pass(world, protobuf(model, seq_id, datum(tokens)))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["request_id"])


def prompt(*tokens: int) -> Json:
    return {"prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]}}


async def test_a_pass_has_the_vocabulary_and_the_context_of_its_model(world: World) -> None:
    large, small = await world.model(), await world.model(base_model=SMALL)
    pending = [await trained(world, large, 1, [11] * 5), await trained(world, small, 1, [9] * 4)]
    assert [row.request_id for row in await world.queued()][-2:] == pending
    unknown = await world.failure(await trained(world, small, 2, [11]))
    assert "is 11, expected a token id in [0, 10)" in unknown
    long = await world.failure(await trained(world, small, 3, [9] * 5))
    assert f"expected at most 4 (the setting context_length of base model {SMALL})" in long


async def test_a_sample_has_those_of_its_sampling_session(world: World) -> None:
    large, small = await world.sampler(), await world.sampler(base_model=ALIAS)
    at_most = {"sampling_params": {"max_tokens": 1}}
    await world.ok("asample", sample(large, 0, **prompt(11, 11, 11, 11, 11), **at_most))
    await world.ok("asample", sample(small, 0, **prompt(9, 9, 9), **at_most))
    refused = await world.post("asample", sample(small, 1, **prompt(11), **at_most))
    assert (refused.status_code, "[0, 10)" in refused.text) == (400, True)
    refused = await world.post("asample", sample(small, 2, **prompt(*[9] * 5), **at_most))
    told = f"5 prompt tokens + 1 max_tokens > 4 (the setting context_length of base model {SMALL})"
    assert (refused.status_code, told in refused.text) == (400, True)


async def test_a_flood_of_samples_of_one_base_model_refuses_none_of_another(settings: Settings) -> None:
    """No engine answers, so that all that were accepted wait."""
    async with running(settings.model_copy(update={"sample_backlog": 2}), FACTS, OTHER) as world:
        flooded, other = await world.sampler(base_model=SMALL), await world.sampler()
        model = await world.model(base_model=SMALL)
        path = await world.checkpoint(model, CheckpointKind.SAMPLER_WEIGHTS, "a")
        at_most = {"sampling_params": {"max_tokens": 1}, **prompt(9)}
        for number in range(2):
            await world.ok("asample", sample(flooded, number, **at_most))
        refused = await world.post("asample", sample(flooded, 2, **at_most))
        told = f"2 samples of {SMALL} are waiting, and the server accepts 2"
        assert (refused.status_code, told in refused.json()["detail"]) == (429, True)
        await world.ok("asample", sample(other, 0, **at_most))

        async def complete(model: str) -> int:
            url = "http://api/oai/api/v1/completions"
            return (await world.http.post(url, json={"model": model, "prompt": "a"})).status_code

        no_engine = 503
        assert [await complete(each) for each in (SMALL, path, BASE)] == [429, 429, no_engine]
        assert await complete("tinker://none:train:0/sampler_weights/a") == 404


async def test_rows_have_canonical_names_whatever_the_client_says(world: World) -> None:
    session = await world.session()
    model = await world.model(session, base_model=ALIAS)
    sampler = await world.sampler(session, base_model=ALIAS)
    assert await world.sampler(session, base_model=SMALL) == sampler, "the same, by another of its names"
    saved = await world.checkpoint(model, CheckpointKind.WEIGHTS, "a", base_model=ALIAS)
    body = {"session_id": session, "model_seq_id": 1, "path": saved, "optimizer": False, "base_model": ALIAS}
    loaded = str((await world.ok("load_weights", body))["model_id"])
    with reading(world.store) as conn:
        rows = [
            *(model_records.by_id(conn, ModelId(each)) for each in (model, loaded)),
            sampling_sessions.get(conn, SamplingSessionId(sampler)),
        ]
    assert [row and row.base_model for row in rows] == [SMALL] * 3


async def test_a_checkpoint_brings_its_base_model_and_goes_into_no_other(world: World) -> None:
    model = await world.model(base_model=SMALL)
    saved = await world.checkpoint(model, CheckpointKind.WEIGHTS, "a")
    sampled = await world.checkpoint(model, CheckpointKind.SAMPLER_WEIGHTS, "a")
    session = await world.session()

    async def load(number: int, **changes: Any) -> Json:
        body = {"session_id": session, "model_seq_id": number, "path": saved, "optimizer": False, **changes}
        return await world.ok("load_weights", body)

    made = await load(0)
    assert "[0, 10)" in await world.failure(await trained(world, str(made["model_id"]), 1, [11]))
    refused = await world.failure((await load(1, base_model=BASE))["request_id"])
    assert refused == f"{saved} is of base model '{SMALL}', expected {BASE}"
    sampler = await world.sampler(session, model_path=sampled)
    assert (await world.http.get(f"samplers/{sampler}")).json()["base_model"] == SMALL
    body = {"session_id": session, "sampling_session_seq_id": 1, "model_path": sampled}
    other = await world.post("create_sampling_session", {**body, "base_model": BASE})
    told = f"{sampled} is of base model '{SMALL}', expected {BASE}"
    assert (other.status_code, other.json()["detail"]) == (400, told)
    await world.ok("create_sampling_session", {**body, "base_model": ALIAS})


async def test_what_is_served_is_listed_and_described_by_name(world: World) -> None:
    models = (await world.http.get("get_server_capabilities")).json()["supported_models"]
    assert [(each["model_name"], each["max_context_length"]) for each in models] == [(BASE, 64), (SMALL, 4)]
    listed = (await world.http.get("http://api/oai/api/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == [BASE, SMALL]
    served = (await world.http.get("console/now")).json()["server"]["base_models"]
    assert [each["base_model"] for each in served] == [BASE, SMALL]
    info = await world.ok("get_info", {"model_id": await world.model(base_model=SMALL)})
    assert (info["model_name"], info["model_data"]["tokenizer_id"]) == (SMALL, ALIAS)
    unknown = await world.http.get("tokenizer", params={"base_model": "no/such"})
    assert (unknown.status_code, unknown.json()["detail"]) == (
        400,
        f"base_model is 'no/such', expected one that is served: {BASE}, {SMALL}",
    )


async def test_a_base_model_is_looked_up_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []
    by_id = model_records.by_id
    monkeypatch.setattr(
        base_limits.model_records, "by_id", lambda conn, model: looked_up.append(model) or by_id(conn, model)
    )
    monkeypatch.setattr(base_limits, "MOST_KNOWN", 2)
    limits, session = world.services.limits, await world.session()
    models = [ModelId(await world.model(session, number, base_model=SMALL)) for number in range(3)]
    looked_up.clear()
    for model in (models[0], models[0], models[1], models[0], models[2], models[0], models[1]):
        assert await limits.of_model(model) == limits.of(OTHER)
    assert looked_up == [models[0], models[1], models[2], models[1]], "the one asked for last was kept"


async def test_a_model_that_the_store_does_not_know_is_asked_for_again(world: World) -> None:
    """Its creation may be about to be committed."""
    limits = world.services.limits
    assert await limits.of_model(ModelId("none")) == limits.of(FACTS)
    session = SamplingSessionId("none")
    assert await limits.of_sampling_session(session, None) == limits.of(FACTS)
    assert limits._known == {}


async def test_requests_of_a_base_model_that_is_not_served_say_so(world: World, settings: Settings) -> None:
    """In place of a complaint about tokens or lengths that another base model has not."""
    model, sampler = await world.model(base_model=SMALL), await world.sampler(base_model=SMALL)
    await post_pass(world, protobuf(model, 1, datum([1])))
    row = await journal.model_of(world.store, ModelId(model))
    async with running(settings, FACTS) as alone:
        starting = await trained(alone, model, 2, [11])
        assert (await alone.queued())[-1].request_id == starting, "until the engine has parked its model"
        parked = partial(model_records.set_state, key=row.key, state=ModelState.PARKED, reason="is parked")
        await alone.store.write(parked)
        told = (await alone.result(await trained(alone, model, 3, [VOCABULARY]), **PROTOBUF)).json()
        assert (told["error"], told["category"]) == ("is parked", "server")
        refused = await alone.post("asample", sample(sampler, 0, **prompt(VOCABULARY)))
        assert refused.status_code == 400
        assert f"{sampler} is of base model '{SMALL}', expected {BASE}" in refused.text


async def test_a_base_model_that_is_sampled_only_takes_no_model(world: World, settings: Settings) -> None:
    """A model of the time when it was trained stays parked, and its samplers are sampled."""
    model = await world.model(base_model=SMALL)
    saved = await world.checkpoint(model, CheckpointKind.WEIGHTS, "a")
    sampled = await world.checkpoint(model, CheckpointKind.SAMPLER_WEIGHTS, "a")
    row = await journal.model_of(world.store, ModelId(model))
    own = {SMALL: BaseOverrides(roles=("sample",), replicas=2, start="on_demand")}
    async with running(settings.model_copy(update={"bases": own}), FACTS, ONLY_SAMPLED) as now:
        models = (await now.http.get("get_server_capabilities")).json()["supported_models"]
        assert [(each["trainable"], each["sampleable"]) for each in models] == [(True, True), (False, True)]
        await now.set_engine("ready", "", **{BASE: ("ready", ""), SMALL: ("stopped", "it starts on demand")})
        view = (await now.http.get("console/now")).json()
        served = view["server"]["base_models"]
        assert [(each["state"], each["detail"]) for each in served] == [
            ("ready", ""),
            ("stopped", "it starts on demand"),
        ]
        assert (view["ready"], [each["level"] for each in view["problems"]]) == (True, ["error"])
        listed = await now.http.get("http://api/readyz")
        assert (listed.status_code, listed.json()["base_models"][1]["state"]) == (200, "stopped")
        told = [(each["trainable"], each["trainer_ranks"], each["replicas"]) for each in served]
        assert told == [(True, 1, 1), (False, 0, 2)]
        session = await now.session()
        refused = f"base_model '{SMALL}' is served for sampling only (roles of base {SMALL})"
        body = {"session_id": session, "model_seq_id": 0, "base_model": SMALL, "lora_config": {"rank": 8}}
        assert refused in await now.failure((await now.ok("create_model", body))["request_id"])
        body = {"session_id": session, "model_seq_id": 1, "path": saved, "optimizer": False}
        assert refused in await now.failure((await now.ok("load_weights", body))["request_id"])
        sampler = await now.sampler(session, model_path=sampled)
        await now.ok("asample", sample(sampler, 0, **prompt(9), sampling_params={"max_tokens": 1}))
        parked = partial(model_records.set_state, key=row.key, state=ModelState.PARKED, reason="is parked")
        await now.store.write(parked)
        told_of_pass = (await now.result(await trained(now, model, 1, [1]), **PROTOBUF)).json()
        assert (told_of_pass["error"], told_of_pass["category"]) == ("is parked", "server")


async def test_the_highest_rank_is_that_of_the_base_model(settings: Settings) -> None:
    own = {SMALL: BaseOverrides(roles=("train", "sample"), max_lora_rank=4)}
    async with running(settings.model_copy(update={"bases": own}), FACTS, OTHER) as world:
        limits = world.services.limits
        assert limits.of(FACTS).max_lora_rank == settings.max_lora_rank
        assert limits.of(OTHER).max_lora_rank == 4
        session = await world.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": SMALL, "lora_config": {"rank": 8}}
        refused = await world.failure((await world.ok("create_model", body))["request_id"])
        assert refused.endswith(f" to 4 (the setting max_lora_rank of base model {SMALL})")
        model = await world.model(session, 1, base_model=SMALL, lora_config={"rank": 4})
        saved = await world.checkpoint(model, CheckpointKind.WEIGHTS, "a", spec=LoraSpec(8, 1))
        body = {"session_id": session, "model_seq_id": 2, "path": saved, "optimizer": False}
        refused = await world.failure((await world.ok("load_weights", body))["request_id"])
        assert refused.endswith(f"at most 4 (the setting max_lora_rank of base model {SMALL})")


async def test_abilities_are_those_of_the_base_models_engine(settings: Settings) -> None:
    lacking = replace(OTHER, sampler=SamplerAbilities("Plain", seed=False))
    async with running(settings, FACTS, lacking) as world:
        params = {"sampling_params": {"max_tokens": 1, "seed": 1}}
        told = "seed is not supported by this base model's sampling engine, Plain"
        for name in (BASE, SMALL):
            body = {"model": name, "prompt": [1], "max_tokens": 1, "seed": 1}
            sampled = await world.post(
                "asample", sample(await world.sampler(base_model=name), 0, **prompt(1), **params)
            )
            completed = await world.post("http://api/oai/api/v1/completions", body)
            refused = [told in answer.text for answer in (sampled, completed)]
            assert refused == [name == SMALL] * 2, (sampled.text, completed.text)
        models = (await world.http.get("get_server_capabilities")).json()["supported_models"]
        assert [each["sampler"]["seed"] for each in models] == [True, False]
        served = (await world.http.get("console/now")).json()["server"]["base_models"]
        assert [each["sampler"] for each in served] == [str(FACTS.sampler), "Plain without seed"]


async def test_one_that_is_only_trained_is_not_sampled(settings: Settings) -> None:
    """Nor are its sampling sessions from before a restart, whose future requests fail at once."""
    async with running(settings, FACTS, OTHER) as world:
        before = await world.sampler(base_model=SMALL)
    async with running(settings, FACTS, ONLY_TRAINED) as world:
        told = (
            f"base_model '{SMALL}' is served for training only (roles of base {SMALL}), expected one that is"
        )
        told = f"{told} sampled: {BASE}; weights saved under a name can be"
        model = await world.model(base_model=SMALL)
        path = await world.checkpoint(model, CheckpointKind.SAMPLER_WEIGHTS, "a")
        lane = {"model_id": model, "seq_id": 1}
        unnamed = await world.ok("save_weights_for_sampler", {**lane, "sampling_session_seq_id": 0})
        assert told in await world.failure(unnamed["request_id"])
        named = await world.ok("save_weights_for_sampler", {**lane, "seq_id": 2, "path": "b"})
        assert [row.request_id for row in await world.queued()][-1] == named["request_id"]
        session = {"session_id": await world.session(), "sampling_session_seq_id": 0}
        oai = "http://api/oai/api/v1"
        for url, body in (
            ("create_sampling_session", {**session, "base_model": SMALL}),
            ("create_sampling_session", {**session, "model_path": path}),
            ("asample", sample(before, 0, **prompt(1), sampling_params={"max_tokens": 1})),
            (f"{oai}/completions", {"model": SMALL, "prompt": "a"}),
            (f"{oai}/completions", {"model": path, "prompt": "a"}),
        ):
            refused = await world.post(url, body)
            assert (refused.status_code, told in refused.text) == (400, True), refused.text
        refused = await world.post("create_sampling_session", {**session, "base_model": "x"})
        assert f'one that is sampled: {BASE}"' in refused.text
        refused = await world.post(f"{oai}/completions", {"model": "x", "prompt": "a"})
        assert f"expected {BASE}, or a tinker:// path" in refused.text
        models = (await world.http.get("get_server_capabilities")).json()["supported_models"]
        assert [each["sampleable"] for each in models] == [True, False]
        listed = (await world.http.get(f"{oai}/models")).json()["data"]
        assert [each["id"] for each in listed] == [BASE]
        assert (await world.http.get(f"{oai}/models/{SMALL}")).status_code == 400
