"""Ranks that are killed, as the kernel does when memory runs out: fresh ones train on from the journal.

Real ranks, a real journal: the engine's driver on top of a trainer, without an API.
"""

import asyncio
import itertools
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, cast

import numpy as np
import pytest

from skyrl_tinker.domain.ids import FutureStatus, ModelId, ModelKey
from skyrl_tinker.domain.values import AdamParams, LoraSpec, PassOutput
from skyrl_tinker.engine.trainer import trainer_driver
from skyrl_tinker.errors import RankDiedError, TrainerError, TrainerLostError
from skyrl_tinker.protocol.protobuf import pass_results
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.doorbell import SocketBell
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.replay import snapshot_records
from skyrl_tinker.store.store import Store
from skyrl_tinker.training import actors, distributed
from skyrl_tinker.training.actors import Actors
from skyrl_tinker.training.distributed import MeetingPlace
from skyrl_tinker.training.restart_policy import RestartPolicy
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.engine.support import journal
from tests.engine.support.world import World
from tests.support.reads import reading
from tests.training.support.passes import make_data, make_item
from tests.training.support.saves import save_state
from tests.training.test_trainer_group import make_echo

SPECS = (LoraSpec(8, 1), LoraSpec(4, 2, train_mlp=False), LoraSpec(0, 0))
A = ModelKey(1)
BUDGET = 64
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def groups(
    ray_cluster: None, tied_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, TrainerGroup]]:
    """Groups of one rank and of two, started side by side. However often they died, they leave no files."""
    memory = tmp_path_factory.mktemp("memory")
    found = {
        ranks: TrainerGroup.launch(
            TrainerSpec(
                tied_model,
                ranks,
                "cpu",
                "float32",
                1,
                BUDGET,
                timeout_s=60.0,
                start_niceness=1,  # as beside another base model
                memory_root=str(memory),
            )
        )
        for ranks in (1, 2)
    }
    for group in found.values():
        asyncio.run(group.ready())
    assert len(list(memory.iterdir())) == 2, "where each met"
    yield found
    for group in found.values():
        asyncio.run(group.shutdown())
    assert list(memory.iterdir()) == []


class Trained:
    """Three models, an engine that trains them, and its journal. `outputs`: what clients got."""

    def __init__(self, home: Path, group: TrainerGroup) -> None:
        self._home = home
        self._group = group
        home.mkdir()
        url = f"sqlite:///{home / 'store.db'}"
        migrate(url)
        self.store = Store.open(url)
        self._bell = SocketBell.bind(home, "engine")
        self.world = self._engine()
        self.models: list[ModelId] = []
        self.outputs: list[Any] = []
        self._seq_id = 0

    def _engine(self) -> World:
        return World(self.store, self._bell, self._home / "checkpoints", self._group)

    async def begin(self) -> None:
        for number, spec in enumerate(SPECS):
            created = await journal.submit_create(
                self.store, await journal.new_session(self.store), number, spec
            )
            assert created.model_id is not None
            assert (await self.world.done(created)).status is FutureStatus.DONE
            self.models.append(created.model_id)

    async def submit(self) -> list[Accepted]:
        """Two passes and a step of each model."""
        accepted = []
        for part in range(3):
            self._seq_id += 1
            for model in self.models:
                if part < 2:
                    accepted.append(await journal.submit_pass(self.store, model, self._seq_id))
                else:
                    params = AdamParams(1e-2)
                    accepted.append(await journal.submit_step(self.store, model, self._seq_id, params))
        return accepted

    async def finish(self, accepted: list[Accepted]) -> None:
        for each in accepted:
            outcome = await self.world.done(each, within_s=90)
            assert outcome.status is FutureStatus.DONE, outcome.body
            body = outcome.body or b""
            self.outputs.append(
                pass_results.forward_backward_output_json(body)
                if outcome.content_type == pass_results.PROTOBUF
                else body
            )

    async def step(self) -> None:
        await self.finish(await self.submit())

    async def restart_engine(self) -> None:
        """Its ranks die with it, as all that it has started."""
        await self.world.end()
        self._group.broken = TrainerError("the engine died")
        self.world = self._engine()

    async def end(self) -> dict[str, np.ndarray]:
        """The weights and moments of all models."""
        state: dict[str, np.ndarray] = {}
        for index, model in enumerate(self.models):
            key = await journal.key_of(self.store, model)
            directory = self._home / f"end{index}"
            await save_state(self._group, key, str(directory), optimizer=True)
            for file in sorted(directory.glob("*.safetensors")):
                state[f"{index} {file.name}"] = np.frombuffer(file.read_bytes(), np.uint8)
            await self._group.release(key)
        await self.world.end()
        self._bell.close()
        await self.store.close()
        return state


async def kill(group: TrainerGroup) -> None:
    """The last rank; the others find out."""
    os.kill(group.pids()[-1], signal.SIGKILL)


async def train(home: Path, group: TrainerGroup, *, disturbed: bool) -> tuple[list[Any], Any, int]:
    trained = Trained(home, group)
    restarts = group.restarts
    await trained.begin()
    await trained.step()
    accepted = await trained.submit()
    if disturbed:  # while they run
        await asyncio.sleep(0.02)
        await kill(group)
    await trained.finish(accepted)
    if disturbed:  # while nothing runs
        await kill(group)
        await group.watch(PATIENCE_S)
        trained.world.driver.wake()
    await trained.step()
    if disturbed:
        await trained.restart_engine()
    await trained.step()
    if disturbed:  # from snapshots
        await trained.world.until(lambda: kept(trained), all)
        await trained.restart_engine()
    await trained.step()
    return trained.outputs, await trained.end(), group.restarts - restarts


async def kept(trained: Trained) -> list[bool]:
    keys = [await journal.key_of(trained.store, model) for model in trained.models]
    with reading(trained.store) as conn:
        return [snapshot_records.find(conn, key) is not None for key in keys]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
async def test_training_goes_on_as_if_nobody_had_died(
    groups: dict[int, TrainerGroup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Adapters and a full copy: on one rank results, weights and moments are the same to the last bit."""
    monkeypatch.setattr(trainer_driver, "IDLE_S", 0.1)
    group = groups[ranks]
    outputs, state, _ = await train(tmp_path / "1", group, disturbed=False)
    found_outputs, found_state, restarts = await train(tmp_path / "2", group, disturbed=True)
    assert restarts >= 4
    assert found_state.keys() == state.keys()
    if ranks == 1:
        assert found_outputs == outputs
        for name, content in state.items():
            np.testing.assert_array_equal(found_state[name], content, err_msg=name)
        return
    for found, output in zip(found_outputs, outputs, strict=True):
        if isinstance(output, dict):
            assert found["metrics"] == pytest.approx(output["metrics"], rel=1e-5)


@pytest.fixture
async def two(groups: dict[int, TrainerGroup]) -> AsyncIterator[TrainerGroup]:
    yield groups[2]
    await groups[2].release(A)


@pytest.fixture
async def one(groups: dict[int, TrainerGroup]) -> AsyncIterator[TrainerGroup]:
    yield groups[1]
    await groups[1].release(A)


@pytest.mark.long
async def test_broken_ranks_say_so_until_fresh_ones_are_up(two: TrainerGroup, tmp_path: Path) -> None:
    """What was captured dies with them; the sender of weights is there again."""
    await two.create_model(A, SPECS[0])
    await two.open_sender(make_echo())
    captured = await two.capture_state(A, optimizer=True)
    await kill(two)
    with pytest.raises(TrainerError, match="rank 1 died in sending weights"):
        await two.sender_call("say", "hello")
    await two.watch(PATIENCE_S)
    with pytest.raises(TrainerError, match="died"):
        await two.zero_gradients([A])
    with pytest.raises(TrainerError, match="died in write_state"):
        await two.persist_state(captured, str(tmp_path / "c"))
    assert not os.listdir(tmp_path)
    await two.release(A)
    await two.offload()
    await two.onload()
    await two.restart()
    await two.create_model(A, SPECS[0])
    assert await save_state(two, A, str(tmp_path / "c"), optimizer=True) > 0
    assert await two.sender_call("say", "hello") == [(0, "hello"), (1, "hello")]


class LosesReplies:
    """The ranks of a group, which die when they have done what they were to write."""

    def __init__(self, group: TrainerGroup, ranks: Actors) -> None:
        self._group = group
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    async def write_call(self, rank: int, *args: Any) -> Any:
        await self._ranks.write_call(rank, *args)
        await kill(self._group)
        raise RankDiedError(f"rank {rank} died")


@pytest.mark.long
async def test_a_checkpoint_whose_rank_died_before_it_said_so_is_not_left(
    one: TrainerGroup, tmp_path: Path
) -> None:
    one.note_work()  # or deaths in a row would be one too many
    await one.create_model(A, SPECS[0])
    captured = await one.capture_state(A, optimizer=True)
    ranks = cast(Actors, LosesReplies(one, captured.ranks))
    with pytest.raises(RankDiedError):
        await replace(captured, ranks=ranks).persist(str(tmp_path / "c"))
    assert not os.listdir(tmp_path)
    await one.watch(PATIENCE_S)
    bound, one.captured.most = one.captured.most, 1
    await one.restart()
    assert one.captured.most == bound, "of the hosts that the ranks have now"


@pytest.mark.long
async def test_a_unit_does_not_wait_for_a_rank_that_hangs(two: TrainerGroup) -> None:
    await two.create_model(A, SPECS[0])
    os.kill(two.pids()[-1], signal.SIGSTOP)
    item = make_item(A, make_data((40, 50), 1))
    running = asyncio.create_task(two.run_pass(two.prepare([item])))
    await asyncio.sleep(0.2)
    await two.watch(patience_s=1.0)
    with pytest.raises(TrainerError):
        await running
    await two.restart()
    await two.create_model(A, SPECS[0])
    (output,) = (await two.run_pass(two.prepare([item]))).outputs
    assert isinstance(output, PassOutput)


@pytest.mark.long
async def test_fresh_ranks_are_not_given_up_before_they_have_answered_once(one: TrainerGroup) -> None:
    one.note_work()
    await kill(one)
    await one.watch(PATIENCE_S)
    restarting = asyncio.create_task(one.restart())
    while not one.pids():
        await one.watch(patience_s=0.0)  # they need seconds to answer at first
        await asyncio.sleep(0.01)
    await restarting
    await one.create_model(A, SPECS[0])


@pytest.mark.long
async def test_fresh_ranks_that_do_not_start_are_given_up_and_started_again(
    one: TrainerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.note_work()
    await kill(one)
    await one.watch(PATIENCE_S)
    monkeypatch.setattr(actors, "START_S", 0.0)
    with pytest.raises(TrainerError, match="did not start within 0 s"):
        await one.restart()
    monkeypatch.undo()
    await one.restart()
    await one.create_model(A, SPECS[0])


def _meet_only(place: MeetingPlace, loaded: Event) -> None:
    """In a process of its own: a rank whose disk is slow."""
    distributed.join(place, 1, 2, "cpu", 60.0)
    assert loaded.wait(PATIENCE_S)


def _load(place: MeetingPlace, directory: str, loaded: Event) -> None:
    """In a process of its own: its peer."""
    Worker(TrainerSpec(directory, 2, "cpu", "float32", 1, BUDGET), 0).join(place)
    loaded.set()


@pytest.mark.long
def test_a_rank_loads_the_base_model_without_its_peers(tied_model: str, tmp_path: Path) -> None:
    """They may load for longer than a collective may take."""
    place = distributed.meeting_place(str(tmp_path))
    with multiprocessing.get_context("spawn").Manager() as manager:
        loaded = manager.Event()
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            slow = pool.submit(_meet_only, place, loaded)
            pool.submit(_load, place, tied_model, loaded).result()
            slow.result()


def test_ranks_that_die_as_soon_as_they_are_up_are_given_up() -> None:
    now = itertools.count(0, 25)  # seconds
    lives, cause = RestartPolicy(lambda: next(now)), TrainerError("rank 0 died")
    for _ in range(2):
        lives.died(cause)
        lives.born()
    with pytest.raises(TrainerLostError, match="rank 0 died; that was the 3rd time, before or within 60 s"):
        lives.died(cause)


def test_ranks_whose_starts_fail_are_given_up_however_long_each_takes() -> None:
    now = itertools.count(0, 700)  # seconds
    lives, cause = RestartPolicy(lambda: next(now)), TrainerError("rank 1 could not load")
    for _ in range(2):
        lives.died(cause)
    with pytest.raises(TrainerLostError):
        lives.died(cause)


@pytest.mark.parametrize("saving", ["a unit is through", "they lived for long"])
def test_ranks_that_work_or_live_long_may_die_often(saving: str) -> None:
    now = itertools.count(0, 61 if saving == "they lived for long" else 0)
    lives = RestartPolicy(lambda: next(now))
    for _ in range(10):
        lives.died(TrainerError("rank 0 died"))
        lives.born()
        if saving == "a unit is through":
            lives.worked()
