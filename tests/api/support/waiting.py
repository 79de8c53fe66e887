"""API and engine on one database, with work that takes as long as a test wants it to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from skyrl_tinker.api.waiting import engine_client, engine_queues
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine.bases.base_runtime import BaseRuntime
from skyrl_tinker.engine.bases.sample_dispatch import SampleDispatch
from skyrl_tinker.engine.bases.train_dispatch import TrainDispatch
from skyrl_tinker.engine.colocation.placement import SEPARATE, Placement
from skyrl_tinker.engine.compose import make_tmpfs_spill
from skyrl_tinker.engine.deadlines import Deadlines
from skyrl_tinker.engine.gaps import Gaps
from skyrl_tinker.engine.http_server import EngineHttpServer
from skyrl_tinker.engine.intake import Intake
from skyrl_tinker.engine.openai.chat_abilities import ChatAbilities
from skyrl_tinker.engine.openai.openai_relay import OpenAIRelay
from skyrl_tinker.engine.openai.openai_routes import OpenAIRoutes
from skyrl_tinker.engine.openai.openai_server import OpenAIServer
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.parity.warning_board import WarningBoard
from skyrl_tinker.engine.sampler.ephemeral_versions import EphemeralVersions
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.scheduling.slots import Concurrency
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.training_half import compose_training
from skyrl_tinker.protocol.queue_views import QueuesView, ReplicaView
from skyrl_tinker.storage.storage_port import LOCAL_DISK
from skyrl_tinker.store.doorbell import SocketBell
from skyrl_tinker.store.store import Store
from tests.api.support.world import FACTS, Json, World, running
from tests.support.scripted_samplers import ScriptedSamplers
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.waiting import PATIENCE_S, until

REPLICA = ReplicaView("http://10.0.0.2:8100", "serving", "10.0.0.2", "gloo", "pull")


def slow_samplers() -> ScriptedSamplers:
    """Return samplers whose samples wait for their `go_on`."""
    made = ScriptedSamplers(FACTS.names)
    made.go_on.clear()
    made.replicas = (REPLICA,)
    return made


@dataclass
class Waiting:
    """`api`: the first of the API processes. `looks`: how often an API asked the engine what waits.

    `enforced`: deadlines are, by this machine's clock; else by the test, which does not hurry then.
    """

    store: Store
    settings: Settings
    trainer: ScriptedTrainer = field(default_factory=ScriptedTrainer)
    samplers: ScriptedSamplers = field(default_factory=slow_samplers)
    placement: Placement = SEPARATE
    enforced: bool = False
    apis: list[World] = field(default_factory=list)
    looks: int = 0

    def __post_init__(self) -> None:
        self.bell = SocketBell.bind(self.settings.root, "engine")
        store, trainer, samplers = self.store, cast(Any, self.trainer), cast(Any, self.samplers)
        metrics = self.metrics = Metrics(clock=store.now)
        outbox = Outbox(store, self.bell, metrics)
        self.sampler = SamplerDriver(
            store, samplers, outbox, Concurrency(*2 * [self.settings.sample_concurrency or 8]), metrics
        )
        spill = make_tmpfs_spill(self.settings)
        self.samples = SampleDispatch([self.sampler], outbox, metrics)
        forget = self.samples.forget_sources
        versions = EphemeralVersions(store, [samplers], forget, spill, self.settings)
        base = BaseRuntime(
            self.settings, FACTS, trainer, samplers, LOCAL_DISK, self.placement, cast(Any, None)
        )
        self.driver, _ = compose_training(
            base, trainer, store, outbox, versions, WarningBoard(store), metrics
        )
        self.training = TrainDispatch([self.driver], store)
        self._intake = Intake(store, self.bell, self.training, self.samples, metrics)
        self.deadlines = Deadlines(
            store,
            metrics,
            self.training,
            self.samples,
            Gaps(store, self.bell, self.training),
            self.settings.timeouts.request_s,
        )
        none: Any = None
        relay = OpenAIRelay(store, samplers, none, FACTS.name, self.sampler, metrics)
        openai = OpenAIServer(samplers, none, FACTS, lambda: ChatAbilities(frozenset()), self.sampler, relay)
        routes = OpenAIRoutes(store, [openai], metrics)
        self.gateway = EngineHttpServer(
            Directories(self.settings).engine_socket,
            routes,
            metrics,
            AsyncMock(return_value=b""),
            self._view,
            lambda asked: f"{asked.base_model}: {asked.action}",
            MiB,
        )

    @property
    def api(self) -> World:
        return self.apis[0]

    def _view(self) -> QueuesView:
        self.looks += 1
        return QueuesView(
            self.training.views(),
            self.samples.views(),
            self.metrics.trained_meter.rates(),
            self.metrics.sampled_meter.rates(),
        )

    async def run(self) -> None:
        cursor = await self.training.resume()
        parts = [self.driver.run(AsyncMock()), self.sampler.run(), self._intake.run(cursor)]
        async with self.driver.background:
            await asyncio.gather(*parts, *([self.deadlines.run()] if self.enforced else []))


@asynccontextmanager
async def waiting(
    settings: Settings,
    apis: int = 1,
    placement: Placement = SEPARATE,
    *,
    deadlines: bool = False,
    bases: tuple[BaseModelFacts, ...] = (FACTS,),
) -> AsyncIterator[Waiting]:
    """Build it from `settings`, whose database is migrated already. `bases`: the engine has the first."""
    directories = Directories(settings)
    directories.make()
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for module, name in ((engine_client, "ASK_S"), (engine_queues, "PATIENCE_S")):
            patch.setattr(module, name, PATIENCE_S)  # on a busy machine the engine is slow, and not away
        stack.callback(directories.delete_outside_home)
        store = Store.open(settings.store_url)
        stack.push_async_callback(store.close)
        made = Waiting(store, settings, placement=placement, enforced=deadlines)
        stack.callback(made.bell.close)
        await made.gateway.start()
        stack.push_async_callback(made.gateway.close)
        task = asyncio.create_task(made.run())
        stack.push_async_callback(_ended, task)
        for _ in range(apis):
            made.apis.append(await stack.enter_async_context(running(settings, *bases)))
        yield made


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


async def told(world: World, request_id: str) -> tuple[str, str | None]:
    """Return state and reason of a poll that timed out."""
    answer = await world.retrieve(request_id)
    assert answer.status_code == 408, answer.text
    return answer.json()["queue_state"], answer.json().get("queue_state_reason")


async def is_told(world: World, request_id: str, state: str, text: str) -> None:
    """Wait for this state and reason: the engine may not have read the request yet."""
    await until(lambda: told(world, request_id), (state, text).__eq__)


async def ready_model(world: World, session: str | None = None) -> str:
    model = await world.model(session)
    await until(world.queued, lambda rows: all(row.kind is not RequestKind.CREATE_MODEL for row in rows))
    return model


async def submit(world: World, path: str, body: Json) -> str:
    return str((await world.ok(path, body))["request_id"])
