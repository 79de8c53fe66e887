"""Sampling sessions and asample: refused at once when wrong, accepted once when right."""

from typing import Any

import pytest

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.protocol.stored_requests import sample_from_body
from skyrl_tinker.store.futures import queue
from tests.api.support.base_facts import CONTEXT
from tests.api.support.world import BASE, World, sample


async def test_a_session_of_the_base_model_says_what_it_samples(world: World) -> None:
    sampler = await world.sampler()
    answer = (await world.http.get(f"samplers/{sampler}")).json()
    assert answer == {"sampler_id": sampler, "base_model": BASE, "model_path": None}
    assert (await world.http.get("samplers/no")).status_code == 404


async def test_a_session_of_a_checkpoint_tells_its_base_model(world: World) -> None:
    path = await world.checkpoint(await world.model(), CheckpointKind.SAMPLER_WEIGHTS, "one")
    session = await world.session()
    for number, also in enumerate([{}, {"base_model": BASE}]):
        sampler = await world.sampler(session, number, model_path=path, **also)
        answer = (await world.http.get(f"samplers/{sampler}")).json()
        assert (answer["base_model"], answer["model_path"]) == (BASE, path)


async def test_the_same_session_again_has_the_same_id(world: World) -> None:
    session = await world.session()
    assert await world.sampler(session, 0) == await world.sampler(session, 0)
    assert await world.sampler(session, 1) != await world.sampler(session, 0)
    assert await world.sampler(session, 0, base_model="/models/tiny") == await world.sampler(session, 0)
    path = await world.checkpoint(await world.model(), CheckpointKind.SAMPLER_WEIGHTS, "one")
    other = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    assert (await world.post("create_sampling_session", other)).status_code == 422


async def test_a_retry_gets_its_session_though_the_checkpoint_is_deleted_by_then(world: World) -> None:
    model, session = await world.model(), await world.session()
    path = await world.checkpoint(model, CheckpointKind.SAMPLER_WEIGHTS, "one")
    first = await world.sampler(session, 0, model_path=path)
    await world.http.delete(f"training_runs/{model}/checkpoints/sampler_weights/one")
    assert await world.sampler(session, 0, model_path=path) == first
    late = {"session_id": session, "sampling_session_seq_id": 1, "model_path": path}
    assert (await world.post("create_sampling_session", late)).status_code == 404


@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        ({"base_model": "no/such"}, 400, "no/such"),
        ({}, 400, "base_model"),
        ({"model_path": "nonsense"}, 400, "nonsense"),
        ({"model_path": "tinker://no:train:0/sampler_weights/one"}, 404, "no:train:0"),
    ],
)
async def test_a_wrong_target_is_refused_at_once(
    world: World, target: dict[str, Any], status: int, message: str
) -> None:
    body = {"session_id": await world.session(), "sampling_session_seq_id": 0, **target}
    answer = await world.post("create_sampling_session", body)
    assert answer.status_code == status
    assert int(answer.headers["content-length"]) > 0
    assert message in answer.json()["detail"]


async def test_a_checkpoint_without_sampler_weights_never_samples_the_base_model_instead(
    world: World,
) -> None:
    path = await world.checkpoint(await world.model(), CheckpointKind.WEIGHTS, "one")
    body = {"session_id": await world.session(), "sampling_session_seq_id": 0, "model_path": path}
    answer = await world.post("create_sampling_session", body)
    assert answer.status_code == 400
    assert "save_weights_for_sampler" in answer.json()["detail"]


@pytest.mark.parametrize("count", [1, 16])
async def test_a_sample_has_one_unique_stable_id_per_sequence(world: World, count: int) -> None:
    sampler = await world.sampler()
    body = sample(sampler, 0, num_samples=count)
    first = await world.ok("asample", body)
    other = await world.ok("asample", sample(sampler, 1, num_samples=count))
    assert isinstance(first["request_id"], str)
    assert len(first["sample_sequence_ids"]) == count
    assert len({*first["sample_sequence_ids"], *other["sample_sequence_ids"]}) == 2 * count
    assert await world.ok("asample", body) == first
    assert len(await world.queued()) == 2


@pytest.mark.parametrize("seq_id", [0, 10**9 * 10**9, 2**63 - 1])
async def test_seq_ids_of_clones_have_63_bits(world: World, seq_id: int) -> None:
    await world.ok("asample", sample(await world.sampler(), seq_id))
    assert [row.seq_id for row in await world.queued()] == [seq_id]


async def test_a_sample_of_an_old_sdk_needs_no_types_and_no_defaults(world: World) -> None:
    body = {
        "sampling_session_id": await world.sampler(),
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1]}, {"tokens": [2, 3]}]},
        "sampling_params": {},
    }
    await world.ok("asample", body)
    row = (await world.queued())[0]
    stored = await world.store.read(lambda conn: sample_from_body(queue.read_bodies(conn, [row.id])[row.id]))
    assert (stored.prompt, stored.num_samples) == ((1, 2, 3), 1)
    assert stored.params.stop is None
    assert stored.params.max_tokens is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt": {"chunks": [{"tokens": [10**6]}]}}, "1000000"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "image"),
        ({"num_samples": 0}, "num_samples"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"max_tokens": 62}}, rf"3 prompt tokens + 62 max_tokens > {CONTEXT}"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"stop": [1, "x"]}}, "stop"),
        ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
        ({"seq_id": 2**63}, "seq_id"),
        ({"seq_id": None}, "seq_id"),
        ({"sampling_session_id": None}, "sampling_session_id"),
    ],
)
async def test_a_bad_sample_is_400_with_a_content_length_never_retried(
    world: World, change: dict[str, Any], message: str
) -> None:
    answer = await world.post("asample", {**sample(await world.sampler(), 0), **change})
    assert answer.status_code == 400
    assert int(answer.headers["content-length"]) > 0
    assert message in answer.json()["detail"]
    assert await world.queued() == []


async def test_an_unknown_sampling_session_is_404(world: World) -> None:
    assert (await world.post("asample", sample("no:sample:0", 0))).status_code == 404


async def test_another_payload_under_the_same_seq_id_is_422(world: World) -> None:
    sampler = await world.sampler()
    await world.ok("asample", sample(sampler, 0))
    assert (await world.post("asample", sample(sampler, 0, num_samples=2))).status_code == 422
