"""A trainer driver on a real store. The workers are scripted: what they compute does not matter."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from skyrl_tinker.config import Parity, Recovery, Settings
from skyrl_tinker.domain.ids import FutureStatus, ModelId
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.engine import training_half
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
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.scheduling.slots import Concurrency
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import TrainerLostError
from skyrl_tinker.storage.storage_port import LOCAL_DISK, Storage
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.outcomes import Outcome
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup
from tests.engine.support import journal
from tests.support.reads import reading
from tests.support.scripted_samplers import ScriptedSamplers
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.waiting import PATIENCE_S, until

FACTS = BaseModelFacts("/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))


class World:
    """A journal, the trainer's side of an engine, and its workers."""

    def __init__(
        self,
        store: Store,
        bell: Doorbell,
        root: Path,
        trainer: TrainerGroup | None = None,
        unit_tokens: int = 16384,
        replay_s: float = 1e9,
        storage: Storage = LOCAL_DISK,
        patch: pytest.MonkeyPatch | None = None,
    ) -> None:
        """`trainer`: a real one in place of the scripted workers. `replay_s`: when snapshots are due.

        `storage`: of checkpoints. `patch`: that of the test.
        """
        self.patch = patch or pytest.MonkeyPatch()
        self._successors: list[World] = []
        self.store = store
        self.root = root
        self.workers = ScriptedTrainer()
        trainer = trainer or cast(TrainerGroup, self.workers)
        settings = Settings(
            home=root.parent,
            checkpoints=root,
            recovery=Recovery(replay_s=replay_s, snapshot_share=0.99),
            parity=Parity(probe_tokens=0),
        )
        metrics = Metrics()
        outbox = Outbox(store, bell, metrics)
        self.samplers = ScriptedSamplers()
        samplers = cast(Samplers, self.samplers)
        sampler = SamplerDriver(store, samplers, outbox, Concurrency(8, 8), metrics)
        spill = make_tmpfs_spill(settings)
        samples = SampleDispatch([sampler], outbox, metrics)
        versions = EphemeralVersions(store, [samplers], samples.forget_sources, spill, settings)
        base = BaseRuntime(settings, FACTS, trainer, samplers, storage, SEPARATE, cast(Any, None))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(training_half, "unit_tokens", lambda _: unit_tokens)
            self.driver, self.creation = training_half.compose_training(
                base, trainer, store, outbox, versions, WarningBoard(store), metrics
            )
        self.training = TrainDispatch([self.driver], store)
        self.bell = bell
        self.intake = Intake(store, bell, self.training, samples, metrics)
        self.running = asyncio.ensure_future(self._run())
        self.reports: list[str] = []
        self.ready = False
        self.lost: Callable[[], Awaitable[None]] | None = None
        """Called when the ranks are lost, or the work has ended; then it runs on fresh ones."""
        self.may_end = False

    async def _run(self) -> None:
        async def report(detail: str, *, done: bool = False) -> None:
            self.reports.append(detail)
            self.ready = self.ready or done

        async def train() -> None:
            while True:
                try:
                    await self.driver.run(report, lambda _: self.may_end)
                except* TrainerLostError:
                    if self.lost is None:
                        raise
                if self.lost is not None:
                    await self.lost()

        cursor = await self.training.resume()
        async with self.driver.background:
            await asyncio.gather(train(), self.intake.run(cursor))

    def new_engine(self) -> "World":
        """Kill the engine and start another on its journal and its disk."""
        self.running.cancel()
        self._successors.append(World(self.store, self.bell, self.root, patch=self.patch))
        return self._successors[-1]

    async def end(self) -> None:
        """Kill the engine and its successors, and pass over the errors that they die of."""
        for each in self._successors:
            await each.end()
        self.running.cancel()
        with suppress(asyncio.CancelledError, ExceptionGroup):
            await self.running

    async def model(self, spec: LoraSpec | None = None) -> ModelId:
        session = await journal.new_session(self.store)
        accepted = await journal.submit_create(self.store, session, spec=spec)
        assert (await self.done(accepted)).status is FutureStatus.DONE
        assert accepted.model_id is not None
        return accepted.model_id

    async def done(self, accepted: Accepted, within_s: float = PATIENCE_S) -> Outcome:
        return await self.until(lambda: journal.outcome(self.store, accepted), _finished, within_s)

    async def taken_in(self) -> None:
        """Wait until the drivers have all that was submitted."""
        await self.until(self._all_taken_in)

    def _all_taken_in(self) -> bool:
        with reading(self.store) as conn:
            return not queue.queued_after(conn, self.intake.cursor, 1)

    async def until(
        self, look: Callable[[], Any], wanted: Callable[[Any], object] = bool, within_s: float = PATIENCE_S
    ) -> Any:
        """Return the first look that is wanted. Raises what the engine dies of meanwhile."""
        self.bell.ring("engine")

        def alive() -> Any:
            if self.running.done():
                self.running.result()
            return look()

        return await until(alive, wanted, within_s)


MakeWorld = Callable[..., World]


def _finished(outcome: Outcome) -> bool:
    return outcome.status is not FutureStatus.PENDING
