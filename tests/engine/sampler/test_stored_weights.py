"""Samples of weights in object storage, of which this host has a cache."""

import asyncio
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind, FutureStatus, SamplingSessionId, VersionId
from skyrl_tinker.domain.manifest import write_listing
from skyrl_tinker.domain.values import LoraSpec, WeightVersion
from skyrl_tinker.engine import outbox
from skyrl_tinker.engine.bases.sample_dispatch import CANCELLED, SampleDispatch
from skyrl_tinker.engine.openai.chat_abilities import ChatAbilities
from skyrl_tinker.engine.openai.openai_routes import OpenAIRoutes
from skyrl_tinker.engine.openai.openai_server import OpenAIServer
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.sampler.adapter_cache import AdapterLimits
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.scheduling.slots import Concurrency
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import StorageAwayError
from skyrl_tinker.protocol.schemas.openai import CompletionRequest, parse_openai
from skyrl_tinker.protocol.stored_requests import sample_body
from skyrl_tinker.storage.checkpoint_storage import CheckpointStorage
from skyrl_tinker.store import checkpoint_records, sampling_sessions, weight_versions
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import queue, sample_submission
from skyrl_tinker.store.futures.outcomes import Outcome
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.sample_submission import NewSample
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.atomic_directory import staging_of
from tests.engine.sampler.test_adapter_turns import Batch, ask
from tests.engine.sampler.test_sampler_driver import FACTS
from tests.engine.support import journal
from tests.support.reads import reading
from tests.support.sampler_clients import opened_fleet, vllm_client
from tests.support.waiting import end, until


def stored(storage: CheckpointStorage, root: Path) -> Path:
    """A directory that is here, and in storage."""
    directory = root / "local" / "v1"
    directory.mkdir(parents=True)
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    write_listing(directory)
    storage.store(directory)
    return directory


def samplers_of(storage: CheckpointStorage) -> Samplers:
    client = vllm_client("http://replica", ("http://replica",))
    client.data.http = client.control.http = cast(Any, Batch())
    fleet = opened_fleet(client)
    return Samplers(fleet, cast(Any, None), FACTS, AdapterLimits(4, 1), Metrics(), storage)


async def saved(store: Store, directory: Path) -> str:
    """The path of a checkpoint of sampler weights."""
    key = await journal.key_of(store, model := await journal.ready_model(store))

    def save(conn: Connection) -> None:
        version = weight_versions.insert_version(conn, key, "lora", durable=True)
        weight_versions.publish_version(conn, version, str(directory), 1)
        kind, spec = CheckpointKind.SAMPLER_WEIGHTS, LoraSpec(8, 1)
        new = NewCheckpoint(key, kind, "a", str(directory), FACTS.names[0], spec, 1, version_id=version)
        checkpoint_records.add(conn, new, replace=False)

    await store.write(save)
    return f"tinker://{model}/sampler_weights/a"


def openai_routes(store: Store, storage: CheckpointStorage) -> OpenAIRoutes:
    nothing, driver = cast(Any, None), cast(Any, SimpleNamespace(arriving=nullcontext))
    server = OpenAIServer(samplers_of(storage), nothing, FACTS, nothing, driver, nothing)
    server._abilities = ChatAbilities(frozenset())
    return OpenAIRoutes(store, [server], Metrics())


async def test_weights_that_were_deleted_from_the_cache_are_fetched_again(tmp_path: Path) -> None:
    """At once, though they had counted as here."""
    storage = CheckpointStorage(tmp_path / "local", f"file://{tmp_path}/bucket")
    directory, samplers = stored(storage, tmp_path), samplers_of(storage)
    version = WeightVersion(VersionId(1), "lora", str(directory))
    await samplers.sample(version, ask(1))
    await samplers.unload(version)
    shutil.rmtree(directory)
    await samplers.sample(version, ask(1))
    assert directory.exists()


async def test_openai_requests_fetch_what_has_left_the_cache_before_they_have_a_turn(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = CheckpointStorage(tmp_path / "local", f"file://{tmp_path}/bucket", pauses_s=())
    directory, exists, away = stored(storage, tmp_path), storage._files.exists, True
    shutil.rmtree(directory)
    monkeypatch.setattr(storage._files, "exists", lambda place: _there(away) and exists(place))
    path, routes = await saved(store, directory), openai_routes(store, storage)
    server, version = await routes.find(path, None)
    assert version is not None
    assert version.directory == str(directory)
    request = parse_openai(CompletionRequest, {"model": path, "prompt": "a"})
    with pytest.raises(StorageAwayError):
        await server._prepare(request, [{"prompt": "a"}], 1, None, version)
    away = False
    with pytest.raises(AttributeError):  # there is no sampler that could count the tokens
        await server._prepare(request, [{"prompt": "a"}], 1, None, version)
    assert directory.exists()


async def test_openai_clients_are_told_no_path_of_the_server(store: Store, tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "local", f"file://{tmp_path}/bucket", pauses_s=())
    directory = stored(storage, tmp_path)
    shutil.rmtree(directory)
    staging_of(directory).touch()  # in the way
    app = web.Application()
    app.add_routes(openai_routes(store, storage).routes())
    async with TestClient(TestServer(app)) as client:
        body = {"model": await saved(store, directory), "prompt": "a"}
        answer = await client.post("/oai/api/v1/completions", json=body)
        assert answer.status == 500
        assert (await answer.json())["error"]["message"] == "…/v1 could not be fetched: File exists"


async def test_samples_of_weights_in_storage_that_is_away_wait_and_others_have_their_turns(
    store: Store, bell: Doorbell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "AWAY_S", 0.01)
    storage = CheckpointStorage(tmp_path / "local", f"file://{tmp_path}/bucket", pauses_s=())
    directory, exists, away = stored(storage, tmp_path), storage._files.exists, True
    shutil.rmtree(directory)
    (tmp_path / "unnamed").mkdir()
    monkeypatch.setattr(storage._files, "exists", lambda place: _there(away) and exists(place))
    sent = Outbox(store, bell, Metrics())
    driver = SamplerDriver(store, samplers_of(storage), sent, Concurrency(1, 1), Metrics())
    model = await journal.ready_model(store)
    key = await journal.key_of(store, model)
    session = (await journal.model_of(store, model)).session_id

    def new_sampler(conn: Connection, number: int, directory: Path) -> SamplingSessionId:
        version = weight_versions.insert_version(conn, key, "lora", durable=True)
        weight_versions.publish_version(conn, version, str(directory), 1)
        return sampling_sessions.create(
            conn, session, number, base_model="new", model_path=None, version_id=version
        )

    far, near = [
        await store.write(lambda conn, number=number, at=at: new_sampler(conn, number, at))  # type: ignore[misc]
        for number, at in enumerate((directory, tmp_path / "unnamed"))
    ]
    waiting = [await submit(store, driver, far, number) for number in range(3)]
    running = asyncio.create_task(driver.run())
    others = [await submit(store, driver, near, number) for number in range(3)]
    for accepted in others:
        await until(lambda each=accepted: journal.outcome(store, each), _is_done)  # type: ignore[misc]
    for accepted in waiting:
        assert (await journal.outcome(store, accepted)).status is FutureStatus.PENDING
    ids = [(await journal.outcome(store, accepted)).future_id for accepted in waiting]
    await until(lambda: list(driver._away) == ids)
    assert driver._queued.view(driver._away).queued == {}
    await SampleDispatch([driver], sent, Metrics()).end({ids[0]: CANCELLED})
    assert (await journal.outcome(store, waiting.pop(0))).status is FutureStatus.FAILED
    away = False
    for accepted in waiting:
        await until(lambda each=accepted: journal.outcome(store, each), _is_done)  # type: ignore[misc]
    await until(lambda: (driver.in_flight(), driver.queued(), len(driver._away)) == (0, 0, 0))
    assert len(driver._ends._times) == 6, "each ended once"
    await end(running)


def _there(away: bool) -> bool:
    if away:
        raise OSError("no route to host")
    return True


def _is_done(found: Outcome) -> bool:
    return found.status is FutureStatus.DONE


async def submit(store: Store, driver: SamplerDriver, sampler: SamplingSessionId, seq_id: int) -> Accepted:
    accepted = await store.write(
        lambda conn: sample_submission.submit_sample(
            conn, NewSample(sampler, seq_id, b"", sample_body(ask(1)), 1, 3, 1), None
        )
    )
    with reading(store) as conn:
        driver.submit(queue.queued_after(conn, 0)[-1:])
    return accepted
