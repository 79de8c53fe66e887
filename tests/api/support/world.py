"""The API on a real store, with the test in the engine's place: it finishes futures in that store."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from sqlalchemy import Connection

from skyrl_tinker.api.app import create_app
from skyrl_tinker.api.services import Services
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import CheckpointKind, ModelId, RequestId, VersionId
from skyrl_tinker.domain.samples import SampledSequence, SampleOutput
from skyrl_tinker.domain.values import BaseModelFacts, Failure, PassOutput
from skyrl_tinker.protocol.protobuf import pass_results, sample_results
from skyrl_tinker.store import checkpoint_records, server_state, weight_versions
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.doorbell import Doorbell, SocketBell
from skyrl_tinker.store.futures import finish, outcomes, queue
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store
from tests.api.support.base_facts import BASE, FACTS
from tests.engine.support import journal
from tests.support.reads import reading
from tests.support.sqlite_file import new_file

PROTOBUF = {"Accept": "application/x-protobuf"}
STEP = {"metrics": {"grad_norm": 1.0}}

Json = dict[str, Any]


@dataclass
class World:
    """`http` speaks to the app below /api/v1; `store` is what the engine would hold. `patch`: the test's."""

    settings: Settings
    store: Store
    bell: Doorbell
    app: FastAPI
    http: httpx.AsyncClient
    patch: pytest.MonkeyPatch = field(init=False)  # set by the fixture `world`

    @property
    def services(self) -> Services:
        services: Services = self.app.state.services
        return services

    async def post(self, path: str, body: Mapping[str, Any], **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def ok(self, path: str, body: Mapping[str, Any]) -> Json:
        answer = await self.post(path, body)
        assert answer.status_code == 200, answer.text
        value: Json = answer.json()
        return value

    async def session(self) -> str:
        return str((await self.ok("create_session", {"sdk_version": "0.38.0"}))["session_id"])

    async def model(self, session: str | None = None, number: int = 0, **changes: Any) -> str:
        body = {
            "session_id": session or await self.session(),
            "model_seq_id": number,
            "base_model": BASE,
            "lora_config": {"rank": 8, "train_mlp": True, "train_attn": True, "train_unembed": True},
            **changes,
        }
        return str((await self.ok("create_model", body))["model_id"])

    async def sampler(self, session: str | None = None, number: int = 0, **changes: Any) -> str:
        body = {
            "session_id": session or await self.session(),
            "sampling_session_seq_id": number,
            **(changes or {"base_model": BASE}),
        }
        return str((await self.ok("create_sampling_session", body))["sampling_session_id"])

    async def retrieve(self, request_id: str, **headers: str) -> httpx.Response:
        return await self.post("retrieve_future", {"request_id": request_id}, **headers)

    async def result(self, request_id: str, **headers: str) -> httpx.Response:
        """Poll as the SDK does until the request has ended: on a busy machine later than one short poll."""
        while (answer := await self.retrieve(request_id, **headers)).status_code == 408:
            pass
        return answer

    async def failure(self, request_id: str) -> str:
        """The message of a future that failed by the user's fault."""
        answer = await self.result(request_id, **PROTOBUF)
        assert answer.status_code == 200
        assert answer.json()["category"] == "user"
        return str(answer.json()["error"])

    # What the engine does.

    async def queued(self) -> list[QueuedRow]:
        with reading(self.store) as conn:
            return queue.queued_after(conn, 0)

    async def id_of(self, request_id: str) -> int:
        with reading(self.store) as conn:
            outcome = outcomes.find(conn, RequestId(request_id))
        assert outcome is not None
        return outcome.future_id

    async def succeed(self, request_id: str, content_type: str, body: bytes, *, ring: bool = True) -> None:
        future_id = await self.id_of(request_id)
        await self.store.write(lambda conn: finish.succeed(conn, future_id, content_type, body))
        if ring:
            self.bell.ring("api")

    async def fail(self, request_id: str, message: str) -> None:
        future_id = await self.id_of(request_id)
        await self.store.write(lambda conn: finish.fail(conn, future_id, Failure(message, "server")))
        self.bell.ring("api")

    async def set_engine(self, name: str, detail: str = "", **bases: tuple[str, str]) -> None:
        """`bases`: state and detail of base models, by name."""
        value = {"state": name, "detail": detail, "since": 0.0, "base_models": bases}
        await self.store.write(lambda conn: server_state.put(conn, "engine", value))

    async def checkpoint(self, model_id: str, kind: CheckpointKind, name: str, **changes: Any) -> str:
        """A saved checkpoint; sampler weights come with a version, as the engine publishes them."""
        model = await journal.model_of(self.store, ModelId(model_id))
        key = model.key
        if kind is CheckpointKind.SAMPLER_WEIGHTS:

            def publish(conn: Connection) -> VersionId:
                version = weight_versions.insert_version(conn, key, "lora", durable=True)
                weight_versions.publish_version(conn, version, "/nowhere", 1, changes.get("steps"))
                return version

            changes["version_id"] = await self.store.write(publish)
        fields: dict[str, Any] = {
            "directory": "/nowhere",
            "base_model": model.base_model,
            "spec": model.spec,
            "size_bytes": 10,
        } | changes
        new = NewCheckpoint(model_key=key, kind=kind, name=name, **fields)
        await self.store.write(lambda conn: checkpoint_records.add(conn, new, replace=True))
        return f"tinker://{model_id}/{kind}/{name}"


def settings_for(home: Path, **changes: Any) -> Settings:
    short: Json = {"timeouts": {"long_poll_s": 0.3}, "parity": {"probe_tokens": 0}, "allowed_hosts": ("api",)}
    return Settings(home=home, **{**short, **changes})


def new_home(home: Path, **changes: Any) -> Settings:
    """Settings of a home that has a database without rows."""
    made = settings_for(home, **changes)
    new_file(made.root / "skyrl-tinker.db")
    return made


@asynccontextmanager
async def running(
    settings: Settings, *bases: BaseModelFacts, clock: Callable[[], float] | None = None
) -> AsyncIterator[World]:
    """The app of `settings`, whose database is migrated already; it serves FACTS or the given base models."""
    store = Store.open(settings.store_url, settings.root)
    bell = SocketBell.bind(settings.root, "api")
    try:
        app = create_app(settings, store, Bases(bases or (FACTS,)), bell, clock)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://api/api/v1") as http,
        ):
            world = World(settings, store, bell, app, http)
            await world.set_engine("ready")
            yield world
    finally:
        bell.close()
        await store.close()


async def write_facts(store: Store) -> None:
    await store.write(lambda conn: server_state.put_bases(conn, Bases((FACTS,))))


def pass_output(*logprobs: Sequence[float]) -> bytes:
    arrays = tuple(np.asarray(values, np.float32) for values in logprobs)
    return pass_results.encode_forward_backward_output(PassOutput(RequestId("r"), arrays, {"loss:sum": 1.5}))


def sample_output(*tokens: Sequence[int]) -> bytes:
    sequences = tuple(
        SampledSequence(tuple(values), tuple(-0.5 for _ in values), "length") for values in tokens
    )
    return sample_results.encode_sample_response(SampleOutput(sequences))


def step(model_id: str, seq_id: int, **adam: Any) -> Json:
    return {
        "model_id": model_id,
        "seq_id": seq_id,
        "type": "optim_step",
        "adam_params": adam or {"learning_rate": 1e-3},
    }


def sample(session: str, seq_id: int, **changes: Any) -> Json:
    return {
        "sampling_session_id": session,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4},
        **changes,
    }
