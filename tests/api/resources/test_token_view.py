"""Tokens as text with their values, for their owner only."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from sqlalchemy import delete
from tinker import types
from transformers import AutoTokenizer

from skyrl_tinker.api import pass_heads
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import CheckpointKind, ModelId, ModelKey, SessionId, VersionId
from skyrl_tinker.protocol.protobuf import pass_requests, sample_results
from skyrl_tinker.protocol.schemas.base import MAX_INT64
from skyrl_tinker.protocol.schemas.console import StepMeasures
from skyrl_tinker.store import model_records, sampling_sessions
from skyrl_tinker.store.console import readable_requests, step_points
from skyrl_tinker.store.database.rows import database_time
from skyrl_tinker.store.database.tables import Request
from skyrl_tinker.store.futures import finish
from tests.api.support.databases import ON_BOTH
from tests.api.support.passes import post_pass, protobuf
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.world import BASE, FACTS, World, pass_output, running, sample, sample_output
from tests.store.support.rows import ephemeral

MEASURED = StepMeasures(**dict.fromkeys(step_points.NAMES, 0.5) | {"tokens": 7, "datums": 2})
TEXT = "2+2=4, né 猫"
PROTOBUF = "application/x-protobuf"


@pytest.fixture
async def world(settings: Settings, served: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    async with running(settings, replace(FACTS, directory=str(served), vocab_size=4096)) as made:
        made.patch = monkeypatch
        yield made


def datum_of(tokens: list[int], advantages: list[float]) -> types.Datum:
    """As sampled each logprob was -1. The input of each target is itself."""
    arrays = {"advantages": advantages, "logprobs": [-1.0] * len(tokens)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.asarray(tokens, np.int64)),
            **{name: types.TensorData.from_numpy(np.float32(each)) for name, each in arrays.items()},
        },
    )


async def trained(world: World, tokens: list[int], logprobs: list[float]) -> str:
    """A pass that ran: each advantage is its position."""
    datum = datum_of(tokens, [float(place) for place in range(len(tokens))])
    return await ran(world, await world.model(), 1, [datum], logprobs)


async def ran(
    world: World, model: str, seq_id: int, data: list[types.Datum], *logprobs: list[float], **changes: Any
) -> str:
    body = protobuf(model, seq_id, *data, **{"loss_fn": "importance_sampling", **changes})
    request = str((await post_pass(world, body)).json()["request_id"])
    future_id, result = await world.id_of(request), pass_output(*logprobs)

    def end(conn: object) -> None:
        finish.finish_all(conn, {future_id: finish.FutureResult(PROTOBUF, result)}, [future_id])

    await world.store.write(end)
    return request


async def key_of(world: World, run: str) -> ModelKey:
    return await world.store.read(lambda conn: model_records.by_id(conn, ModelId(run)).key)


async def sampled(
    world: World,
    run: str,
    number: int,
    *,
    steps: int = 0,
    inflight: bool = False,
    version: VersionId | None = None,
) -> str:
    """A sample that finished, of new weights of a run, or of this `version`."""
    if version is None:
        version = await ephemeral(world.store, await key_of(world, run), inflight=inflight, steps=steps)
    session = SessionId(run.partition(":")[0])
    sampler = await world.store.write(
        lambda conn: sampling_sessions.create(
            conn, session, number, base_model=BASE, model_path=None, version_id=version
        )
    )
    request = str((await world.ok("asample", sample(sampler, 0)))["request_id"])
    await world.succeed(request, PROTOBUF, sample_output([7, 8]))
    return request


async def test_a_datum_is_its_targets_with_the_inputs_of_its_loss(world: World, served: Path) -> None:
    tokens = AutoTokenizer.from_pretrained(served).encode(TEXT)
    logprobs = [-0.5 * place for place in range(len(tokens))]
    request = await trained(world, tokens, logprobs)
    told = await get(world, f"console/requests/{request}/tokens")
    assert (told["tokens"], "".join(told["texts"])) == (tokens, TEXT)
    assert len(told["texts"]) == len(tokens)
    assert told["prompt"] == told["texts"][0], "the first input, which is no target"
    assert told["values"]["logprob"] == pytest.approx(logprobs)
    assert told["values"]["advantages"] == list(range(len(tokens)))
    assert told["values"]["difference"][0] is None, "without an advantage it is of the prompt"
    assert told["values"]["difference"][1:] == pytest.approx([each + 1 for each in logprobs[1:]])
    listed = (await get(world, "console/requests"))["requests"]
    assert (await get(world, "console/requests", limit=1))["requests"] == listed[:1]
    assert (await get(world, "console/requests", limit=1, offset=1))["requests"] == listed[1:2]
    unknown = await world.http.get("console/requests?runs=x")
    assert (unknown.status_code, "runs" in unknown.text) == (400, True)
    assert [(each["request_id"], each["kind"]) for each in listed] == [(request, "forward_backward")]


async def test_a_sample_is_one_of_its_sequences(world: World) -> None:
    request = str((await world.ok("asample", sample(await world.sampler(), 0)))["request_id"])
    await world.succeed(request, PROTOBUF, sample_output([5, 6], [7, 8, 9]))
    told = await get(world, f"console/requests/{request}/tokens", item=1)
    assert (told["items"], told["tokens"], told["values"]) == (2, [7, 8, 9], {"logprob": [-0.5] * 3})
    answer = await world.http.get(f"console/requests/{request}/tokens?item=2")
    assert (answer.status_code, answer.json()["detail"]) == (400, "item: found 2, expected a number below 2")


async def test_items_of_one_prompt_are_a_group_with_their_advantages(world: World, served: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served)
    first, second = tokenizer.encode("2+2="), tokenizer.encode("1+1=")
    answer = tokenizer.encode("4 x")
    silent, after = [0.0] * (len(first) - 1), [0.5, -1.5]
    data = [
        datum_of([*prompt[:-1], *answer[:1], 7], [*silent, *advantages])
        for prompt, advantages in ((first, after), (second, after), (first, [2.0, 2.0]))
    ]
    logprobs = [[-9.0] * len(silent) + [-1.0, -2.0]] * 3
    run = await world.model()
    requests = [await ran(world, run, seq_id, data, *logprobs) for seq_id in (1, 2, 3)]
    told = await get(world, f"console/requests/{requests[1]}/items")
    groups = [each["prompt_id"] for each in told["items"]]
    assert groups[0] == groups[2] != groups[1]
    assert [each["advantage"] for each in told["items"]] == [-0.5, -0.5, 2.0]
    assert {(each["tokens"], each["logprob"]) for each in told["items"]} == {(2, -1.5)}
    assert [each["text"][0] for each in told["items"]] == ["4"] * 3
    assert [each["prompt"][:3] for each in told["items"]] == ["2+2", "1+1", "2+2"]
    assert (told["total"], told["earlier"], told["later"]) == (3, requests[0], requests[2])
    page = await get(world, f"console/requests/{requests[1]}/items", limit=1, offset=2)
    assert page["items"] == told["items"][2:]
    beyond = await get(world, f"console/requests/{requests[1]}/items", offset=2**63 - 1)
    assert (beyond["items"], beyond["total"]) == ([], 3)
    last = await get(world, f"console/requests/{requests[2]}/items")
    assert (last["earlier"], last["later"]) == (requests[1], None)


@pytest.mark.parametrize(("more", "cut"), [(0, ""), (1, "…")])
async def test_texts_have_an_ellipsis_where_there_is_more(
    world: World, served: Path, more: int, cut: str
) -> None:
    tokens = AutoTokenizer.from_pretrained(served).encode("4") * (pass_heads.SHOWN + more)
    silent = [0.0] * (len(tokens) - 1)
    data = [datum_of(tokens, [1.0] * len(tokens)), datum_of(tokens, [*silent, 1.0])]
    request = await ran(world, await world.model(), 1, data, *[[-1.0] * len(tokens)] * 2)
    shown = "4" * pass_heads.SHOWN
    first, second = (await get(world, f"console/requests/{request}/items"))["items"]
    assert (first["prompt"], first["text"]) == ("4", shown + cut)
    assert (second["prompt"], second["text"]) == (cut + shown, "4")
    (listed,) = (await get(world, "console/requests"))["requests"]
    assert listed["begins"] == shown + cut


async def test_inputs_of_a_custom_loss_have_any_shape(world: World) -> None:
    """One advantage of a whole datum is usual; other losses have a number of each target under that name."""
    plain = datum_of([5, 6, 7], [1.0, 0.0, 1.0])
    data = [
        replace(plain, loss_fn_inputs={**plain.loss_fn_inputs, name: types.TensorData.from_numpy(values)})
        for name, values in (
            ("advantages", np.array(0.5, np.float32)),
            ("weights", np.float32([[1.0], [2.0]])),
            ("advantages", np.float32([2.0, 4.0])),
        )
    ]
    scores = [[-1.0, -2.0, -3.0]] * 3
    custom = {"loss_fn": "custom", "loss_fn_config": {"loss_id": "mine"}}
    request = await ran(world, await world.model(), 1, data, *scores, **custom)
    items = (await get(world, f"console/requests/{request}/items"))["items"]
    assert [each["advantage"] for each in items] == [0.5, 1.0, None]
    assert [each["tokens"] for each in items] == [3, 3, 3]


async def test_inputs_of_a_custom_loss_stand_beside_the_columns_whose_names_they_have(world: World) -> None:
    names = ("logprob", "sampled logprob", "difference")
    given = {name: types.TensorData.from_numpy(np.float32([7.0, 8.0])) for name in names}
    plain = datum_of([5, 6], [1.0, 1.0])
    datum = replace(plain, loss_fn_inputs={**plain.loss_fn_inputs, **given})
    custom = {"loss_fn": "custom", "loss_fn_config": {"loss_id": "mine"}}
    request = await ran(world, await world.model(), 1, [datum], [-2.0, -3.0], **custom)
    values = (await get(world, f"console/requests/{request}/tokens"))["values"]
    assert [values[name] for name in names] == [[-2.0, -3.0], [-1.0, -1.0], [-1.0, -2.0]]
    assert [values[f"{name} (input)"] for name in names] == [[7.0, 8.0]] * 3


async def test_only_the_items_of_the_page_are_converted(world: World) -> None:
    many = range(8)
    data = [datum_of([5, 6 + number], [1.0, 1.0]) for number in many]
    scores = [[-1.0, -1.0 - number] for number in many]
    trained = await ran(world, await world.model(), 1, data, *scores)
    sampled = str((await world.ok("asample", sample(await world.sampler(), 0)))["request_id"])
    await world.succeed(sampled, PROTOBUF, sample_output(*([5, 6 + number] for number in many)))
    for module, name in ((pass_requests, "read_datum"), (sample_results, "_sequence_json")):
        convert = Mock(wraps=getattr(module, name))
        world.patch.setattr(module, name, convert)
        request = trained if module is pass_requests else sampled
        page = await get(world, f"console/requests/{request}/items", limit=2, offset=5)
        assert ([each["item"] for each in page["items"]], page["total"]) == ([5, 6], 8)
        assert convert.call_count == 2
    told = (await get(world, f"console/requests/{trained}/items", limit=2, offset=5))["items"]
    assert [each["logprob"] for each in told] == [-3.5, -4.0]


@ON_BOTH
async def test_a_sample_has_its_prompt_while_that_is_stored(world: World, served: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served)
    session = await world.ok("create_session", {"sdk_version": "0.38.0", "display_name": "letters"})
    sampler, requests = await world.sampler(str(session["session_id"])), []
    for number, text in enumerate(("2+2=", "1+1=", "2+2=")):
        chunk = {"type": "encoded_text", "tokens": tokenizer.encode(text)}
        body = sample(sampler, number, prompt={"chunks": [chunk]})
        requests.append(str((await world.ok("asample", body))["request_id"]))
    ids = [await world.id_of(each) for each in requests]
    results = dict.fromkeys(ids, finish.FutureResult(PROTOBUF, sample_output([7, 8], [7])))
    await world.store.write(lambda conn: finish.finish_all(conn, results, ids[:2]))
    listed = (await get(world, "console/requests"))["requests"]
    assert [each["prompt"] for each in listed] == [None, "1+1=", "2+2="]
    assert {each["name"] for each in listed} == {"letters"}
    told = await get(world, f"console/requests/{requests[0]}/tokens")
    assert told["prompt"] == "2+2="
    items = (await get(world, f"console/requests/{requests[0]}/items"))["items"]
    assert {each["prompt_id"] for each in items} == {listed[2]["prompt_id"]}
    assert [each["tokens"] for each in items] == [2, 1]
    gone = await get(world, f"console/requests/{requests[2]}/items")
    assert [each["prompt"] for each in gone["items"]] == [None, None]
    assert (gone["earlier"], gone["later"]) == (requests[1], None)


async def test_a_dropped_body_is_said_to_be_dropped(world: World) -> None:
    request = await trained(world, [5, 6], [-1.0, -1.0])
    await world.store.write(lambda conn: conn.execute(delete(Request)))
    answer = await world.http.get(f"console/requests/{request}/tokens")
    assert answer.status_code == 410
    assert "only that of the newest passes of a run is" in answer.json()["detail"]
    (listed,) = (await get(world, "console/requests"))["requests"]
    assert (listed["request_id"], listed["readable"]) == (request, False)


@ON_BOTH
async def test_requests_are_listed_by_run_and_by_kind(world: World) -> None:
    passes = [await trained(world, [5, 6], [-1.0, -1.0]) for _ in range(2)]
    listed = (await get(world, "console/requests"))["requests"]
    runs = {each["request_id"]: each["origin"] for each in listed}
    assert all(each["readable"] for each in listed)
    base = str((await world.ok("asample", sample(await world.sampler(), 0)))["request_id"])
    await world.succeed(base, PROTOBUF, sample_output([7, 8]))
    mine = await sampled(world, runs[passes[0]], 1)

    async def found(**wanted: str) -> list[str]:
        return [each["request_id"] for each in (await get(world, "console/requests", **wanted))["requests"]]

    assert await found(run=runs[passes[0]]) == [mine, passes[0]]
    assert await found(run=runs[passes[1]], kind="forward_backward") == [passes[1]]
    assert await found(kind="sample") == [mine, base]
    assert await found(run="nobody") == []
    assert (await world.http.get("console/requests?kind=steps")).status_code == 400


@ON_BOTH
async def test_what_a_run_did_is_listed_however_many_requests_came_since(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = await world.model(), [datum_of([5, 6], [1.0, 1.0])]
    passes = [await ran(world, run, seq_id, data, [-1.0, -1.0]) for seq_id in (1, 2, 3)]
    old = await ephemeral(world.store, await key_of(world, run))
    samples = [await sampled(world, run, 0), await sampled(world, run, 1, version=old)]
    other = await trained(world, [5, 6], [-1.0, -1.0])
    monkeypatch.setattr(readable_requests, "MOST", 1)

    async def found(**wanted: object) -> list[str]:
        return [each["request_id"] for each in (await get(world, "console/requests", **wanted))["requests"]]

    assert await found() == [other]
    assert await found(run=run) == [samples[1], *passes[::-1]], "the last sample, of older weights"
    assert await found(run=run, limit=1, offset=1) == [passes[2]]
    assert await found(run=run, kind="forward", offset=MAX_INT64) == []


@ON_BOTH
async def test_tokens_are_the_owners_only(world: World) -> None:
    speak_as(world, await new_user(world, "alice"))
    request = await trained(world, [5, 6], [-1.0, -1.0])
    assert (await get(world, f"console/requests/{request}/tokens"))["tokens"] == [5, 6]
    root = await new_user(world, "root", admin=True)
    for key in (await new_user(world, "bob"), root):
        speak_as(world, key)
        for part in ("tokens", "items"):
            assert (await world.http.get(f"console/requests/{request}/{part}")).status_code == 404
        assert await get(world, "console/requests") == {"requests": []}


async def test_a_model_without_a_tokenizer_is_told(settings: Settings) -> None:
    async with running(settings) as bare:
        request = await trained(bare, [5, 6], [-1.0, -1.0])
        answer = await bare.http.get(f"console/requests/{request}/tokens")
    assert answer.status_code == 404
    assert "no tokenizer.json" in answer.json()["detail"]


async def test_tokens_have_text_by_the_tokenizer_of_their_base_model(
    settings: Settings, served: Path
) -> None:
    ours = replace(FACTS, directory=str(served), vocab_size=4096)
    async with running(settings, ours) as world:
        request = await trained(world, [5, 6], [-1.0, -1.0])
        told = await get(world, f"console/requests/{request}/tokens")
    bare = replace(FACTS, names=("org/bare",))
    async with running(settings, bare, ours) as world:
        assert await get(world, f"console/requests/{request}/tokens") == told
    async with running(settings, bare) as world:
        answer = await world.http.get(f"console/requests/{request}/tokens")
    assert answer.status_code == 400
    assert "expected one that is served: org/bare" in answer.json()["detail"]


@ON_BOTH
async def test_a_sample_and_a_pass_have_the_numbers_that_were_reported_of_their_step(world: World) -> None:
    run = await world.model(await named_session(world, "letters"))
    key = await world.store.read(lambda conn: model_records.by_id(conn, ModelId(run)).key)
    data = [datum_of([5, 6], [1.0, 1.0])]
    passes = [await ran(world, run, seq_id, data, [-1.0, -1.0]) for seq_id in (1, 4)]
    await world.store.write(lambda conn: step_points.add(conn, key, 3, database_time(conn), MEASURED))
    samples = [
        await sampled(world, run, number, steps=steps, inflight=inflight)
        for number, (steps, inflight) in enumerate(((0, False), (1, False), (1, True)))
    ]
    for step, values in ((0, {"reward": 0.25}), (1, {"reward": 0.5}), (1, {"reward": 0.75, "length": 2.0})):
        report = {"step": step, "values": values}
        assert (await world.http.post(f"console/runs/{run}/metrics", json=report)).status_code == 200

    async def told(request: str) -> tuple[object, ...]:
        items = await get(world, f"console/requests/{request}/items")
        return items["run"], items["name"], items["step"], items["reported"]

    first = (run, "letters", 0, {"reward": 0.25})
    second = (run, "letters", 1, {"reward": 0.75, "length": 2.0})
    assert [await told(each) for each in passes] == [first, second]
    assert [await told(each) for each in samples] == [first, second, (None, None, None, {})]
    listed = {each["request_id"]: each["step"] for each in (await get(world, "console/requests"))["requests"]}
    assert [listed[each] for each in (*passes, *samples)] == [0, 1, 0, 1, None]


async def named_session(world: World, name: str) -> str:
    session = await world.ok("create_session", {"sdk_version": "0.38.0", "display_name": name})
    return str(session["session_id"])


@ON_BOTH
async def test_of_a_published_checkpoint_of_others_nothing_of_its_run_is_told(world: World) -> None:
    keys = [await new_user(world, name) for name in ("alice", "bob")]
    speak_as(world, keys[0])
    run = await world.model(await named_session(world, "secret"))
    path = await world.checkpoint(run, CheckpointKind.SAMPLER_WEIGHTS, "w", steps=3)
    published = f"training_runs/{run}/checkpoints/sampler_weights/w/publish"
    assert (await world.http.post(published)).status_code == 200
    report = {"step": 3, "values": {"reward": 0.5}}
    assert (await world.http.post(f"console/runs/{run}/metrics", json=report)).status_code == 200
    told = []
    for key in keys:
        speak_as(world, key)
        sampler = await world.sampler(model_path=path)
        request = str((await world.ok("asample", sample(sampler, 0)))["request_id"])
        await world.succeed(request, PROTOBUF, sample_output([7, 8]))
        items = await get(world, f"console/requests/{request}/items")
        told.append((items["run"], items["name"], items["step"], items["reported"]))
    assert told == [(run, "secret", 3, {"reward": 0.5}), (None, None, 3, {})]


@ON_BOTH
async def test_samples_of_others_from_a_published_checkpoint_take_no_places_of_a_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [await new_user(world, name) for name in ("alice", "bob")]
    speak_as(world, keys[0])
    run = await world.model()
    path = await world.checkpoint(run, CheckpointKind.SAMPLER_WEIGHTS, "w")
    published = f"training_runs/{run}/checkpoints/sampler_weights/w/publish"
    assert (await world.http.post(published)).status_code == 200
    requests = []
    for key in keys:  # bob's is the newest
        speak_as(world, key)
        sampler = await world.sampler(model_path=path)
        requests.append(str((await world.ok("asample", sample(sampler, 0)))["request_id"]))
        await world.succeed(requests[-1], PROTOBUF, sample_output([7, 8]))
    monkeypatch.setattr(readable_requests, "MOST", 1)
    for key, request in zip(keys, requests, strict=True):
        speak_as(world, key)
        listed = (await get(world, "console/requests", run=run))["requests"]
        assert [each["request_id"] for each in listed] == [request]


@ON_BOTH
async def test_a_pass_in_the_list_says_what_it_was_and_how_it_begins(world: World, served: Path) -> None:
    tokens = AutoTokenizer.from_pretrained(served).encode(TEXT)
    data = [datum_of(tokens, [1.0] * len(tokens)), datum_of([5, 6], [1.0, 1.0])]
    run = await world.model(await named_session(world, "letters"))
    request = await ran(world, run, 1, data, [-1.0] * len(tokens), [-1.0, -1.0])
    told = await get(world, "console/requests")
    (listed,) = told["requests"]
    facts = {"name": "letters", "origin": run, "step": 0, "loss_fn": "importance_sampling", "datums": 2}
    assert {name: listed[name] for name in facts} == facts
    assert (listed["request_id"], listed["begins"], listed["prompt"]) == (request, TEXT, None)
    world.patch.delattr(pass_heads, "body_of")
    assert await get(world, "console/requests") == told, "its body is read once"
    await world.store.write(lambda conn: conn.execute(delete(Request)))
    (listed,) = (await get(world, "console/requests"))["requests"]
    assert [listed[name] for name in ("loss_fn", "datums", "begins")] == [None] * 3
