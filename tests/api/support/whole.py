"""API and engine on one database. Only what computes is scripted: the trainer's workers and the samplers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast
from unittest.mock import AsyncMock

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.engine.bases.base_runtime import BaseRuntime
from skyrl_tinker.engine.bases.sample_dispatch import SampleDispatch
from skyrl_tinker.engine.bases.train_dispatch import TrainDispatch
from skyrl_tinker.engine.colocation.placement import SEPARATE
from skyrl_tinker.engine.compose import make_tmpfs_spill
from skyrl_tinker.engine.intake import Intake
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.parity.warning_board import WarningBoard
from skyrl_tinker.engine.sampler.ephemeral_versions import EphemeralVersions
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.scheduling.slots import Concurrency
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.training_half import compose_training
from skyrl_tinker.storage.storage_port import LOCAL_DISK
from skyrl_tinker.store.doorbell import Doorbell, SocketBell
from skyrl_tinker.store.store import Store
from tests.api.support.world import FACTS, World, running
from tests.support.scripted_samplers import ScriptedSamplers
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.waiting import end


class Engine:
    """The real one from the journal to the workers' door. `cursor`: futures up to here are dealt with."""

    def __init__(self, settings: Settings, store: Store, bell: Doorbell) -> None:
        self.trainer, self.samplers = ScriptedTrainer(), ScriptedSamplers(FACTS.names)
        self.store = store
        trainer, samplers = cast(Any, self.trainer), cast(Any, self.samplers)
        metrics = Metrics()
        outbox = Outbox(store, bell, metrics)
        self.sampler = SamplerDriver(
            store, samplers, outbox, Concurrency(*2 * [settings.sample_concurrency or 8]), metrics
        )
        spill = make_tmpfs_spill(settings)
        samples = SampleDispatch([self.sampler], outbox, metrics)
        versions = EphemeralVersions(store, [samplers], samples.forget_sources, spill, settings)
        base = BaseRuntime(settings, FACTS, trainer, samplers, LOCAL_DISK, SEPARATE, cast(Any, None))
        self.driver, _ = compose_training(
            base, trainer, store, outbox, versions, WarningBoard(store), metrics
        )
        self.training = TrainDispatch([self.driver], store)
        self.intake = Intake(store, bell, self.training, samples, metrics)

    async def run(self) -> None:
        cursor = await self.training.resume()
        async with self.driver.background:
            await asyncio.gather(self.driver.run(AsyncMock()), self.sampler.run(), self.intake.run(cursor))


class Whole:
    """An engine and API processes that can be ended and started again."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.apis: list[World] = []
        self._running: list[AsyncExitStack] = []

    async def start_api(self) -> None:
        stack = AsyncExitStack()
        self.apis.append(await stack.enter_async_context(running(self.settings)))
        self._running.append(stack)

    async def restart_api(self, number: int) -> None:
        await self._running[number].aclose()
        self._running[number] = stack = AsyncExitStack()
        self.apis[number] = await stack.enter_async_context(running(self.settings))

    async def stop_apis(self) -> None:
        for stack in self._running:
            await stack.aclose()


@asynccontextmanager
async def whole(settings: Settings, apis: int) -> AsyncIterator[Whole]:
    """Build it from `settings`, whose database is migrated already."""
    directories = Directories(settings)
    directories.make()
    store = Store.open(settings.store_url)
    bell = SocketBell.bind(settings.root, "engine")
    engine = Engine(settings, store, bell)
    made = Whole(settings, engine)
    task = asyncio.create_task(engine.run())
    try:
        for _ in range(apis):
            await made.start_api()
        yield made
    finally:
        await made.stop_apis()
        await end(task)
        bell.close()
        await store.close()
        directories.delete_outside_home()
