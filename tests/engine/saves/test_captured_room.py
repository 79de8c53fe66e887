"""Saves of many models while disk or storage hang: what is captured stays within its bound."""

import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from skyrl_tinker.domain.ids import FutureStatus, ModelId, ModelKey, RequestKind
from skyrl_tinker.domain.values import Failure, LoraSpec
from skyrl_tinker.protocol.stored_requests import SaveExternalBody, SaveSamplerBody, SaveWeightsBody
from skyrl_tinker.storage.storage_port import Storage
from skyrl_tinker.store.futures.record import Accepted
from tests.engine.support import journal
from tests.engine.support.world import MakeWorld, World

STATE, SAMPLER, EXPORT = SaveWeightsBody("a"), SaveSamplerBody("a"), SaveExternalBody("a")
KINDS = {
    RequestKind.SAVE_WEIGHTS: STATE,
    RequestKind.SAVE_WEIGHTS_FOR_SAMPLER: SAMPLER,
    RequestKind.SAVE_WEIGHTS_EXTERNAL: EXPORT,
}


class HangingStorage(Storage):
    def __init__(self) -> None:
        self.asked: list[Path] = []
        self.back = threading.Event()

    def store(self, directory: Path) -> None:
        self.asked.append(directory)
        self.back.wait()


async def save(world: World, model: ModelId, seq_id: int, kind: RequestKind) -> Accepted:
    return await journal.submit(world.store, model, seq_id, kind, KINDS[kind].to_bytes())


async def models_of(world: World, sizes: Sequence[int]) -> list[ModelId]:
    world.workers.sizes = {ModelKey(index + 1): size for index, size in enumerate(sizes)}
    return [await world.model() for _ in sizes]


async def all_done(world: World, accepted: Sequence[Accepted]) -> None:
    for each in accepted:
        assert (await world.done(each)).status is FutureStatus.DONE


@pytest.mark.parametrize("kind", KINDS)
async def test_saves_wait_for_memory_while_the_disk_hangs_and_others_train(
    world: World, kind: RequestKind
) -> None:
    world.workers.captured.most = 7
    *models, other = await models_of(world, [3, 3, 3, 3, 3, 3])
    world.workers.disk.clear()
    saves = [await save(world, model, 1, kind) for model in models]
    behind = [await journal.submit_pass(world.store, model, 2) for model in models]
    await world.until(lambda: len(world.workers.held) == 2)
    await world.taken_in()
    await all_done(world, [await journal.submit_pass(world.store, other, 1)])
    assert len(world.workers.held) == 2
    world.workers.disk.set()
    await all_done(world, [*saves, *behind])
    assert world.workers.most_captured == 6
    await world.until(lambda: not world.workers.held)


@pytest.mark.parametrize(("kind", "together"), [*zip(KINDS, (1, 3, 3), strict=True)])
async def test_a_save_counts_with_the_moments_that_it_has(
    world: World, kind: RequestKind, together: int
) -> None:
    world.workers.moments, world.workers.captured.most = 2, 9
    models = await models_of(world, [3, 3, 3])
    world.workers.disk.clear()
    saves = [await save(world, model, 1, kind) for model in models]
    await world.until(lambda: len(world.workers.held) == together)
    world.workers.disk.set()
    await all_done(world, saves)
    assert world.workers.most_captured == 9


async def test_a_save_larger_than_the_bound_runs_alone_and_none_passes_it(world: World) -> None:
    world.workers.captured.most = 7
    small, large, late = await models_of(world, [3, 20, 3])
    world.workers.disk.clear()
    saves = []
    for model in (small, large, late):
        saves.append(await save(world, model, 1, RequestKind.SAVE_WEIGHTS))
        await world.taken_in()
        await all_done(world, [await journal.submit_pass(world.store, await world.model(), 1)])
    assert len(world.workers.held) == 1
    world.workers.disk.set()
    await all_done(world, saves)
    assert world.workers.most_captured == 20
    keys = [await journal.key_of(world.store, model) for model in (small, large, late)]
    assert world.workers.asked("capture") == keys


async def test_a_save_that_will_not_run_holds_up_none_behind_it(world: World) -> None:
    world.workers.captured.most = 7
    small, large, late = await models_of(world, [3, 20, 3])
    world.workers.disk.clear()
    saves = [await save(world, model, 1, RequestKind.SAVE_WEIGHTS) for model in (small, large, late)]
    await world.until(lambda: world.workers.held)
    await world.taken_in()
    await all_done(world, [await journal.submit_pass(world.store, await world.model(), 1)])
    lanes = world.driver._lanes
    lanes.close(await journal.key_of(world.store, large), Failure("it is gone", "server"))
    last = await save(world, await world.model(), 1, RequestKind.SAVE_WEIGHTS)
    await world.until(lambda: len(world.workers.held) > 1)
    world.workers.disk.set()
    await all_done(world, [saves[0], saves[2], last])


@pytest.fixture
def hanging() -> HangingStorage:
    return HangingStorage()


@pytest.fixture
async def stored(make_world: MakeWorld, hanging: HangingStorage) -> AsyncIterator[World]:
    yield make_world(storage=hanging)
    hanging.back.set()


@pytest.mark.parametrize("kind", KINDS)
async def test_storage_that_hangs_holds_no_captured_state(
    stored: World, hanging: HangingStorage, kind: RequestKind
) -> None:
    model = await stored.model()
    accepted = await save(stored, model, 1, kind)
    await stored.until(lambda: hanging.asked)
    assert stored.workers.held == []
    hanging.back.set()
    await all_done(stored, [accepted])


@pytest.mark.parametrize("kind", KINDS)
async def test_saves_that_a_new_engine_repeats_wait_for_memory_too(
    stored: World, hanging: HangingStorage, kind: RequestKind
) -> None:
    models = await models_of(stored, [3, 3, 3, 3])
    saves = [await save(stored, model, 1, kind) for model in models]
    await stored.until(lambda: len(hanging.asked) == len(models))
    after = stored.new_engine()
    after.workers.sizes, after.workers.captured.most = stored.workers.sizes, 7
    after.workers.disk.clear()
    await after.until(lambda: len(after.workers.held) > 1)
    after.workers.disk.set()
    await all_done(after, saves)
    assert after.workers.most_captured == 6


async def test_full_weights_that_busy_samplers_would_read_make_room_for_saves_that_are_repeated(
    stored: World,
) -> None:
    stored.workers.sizes = {ModelKey(number): 3 for number in range(1, 5)}
    stored.workers.disk.clear()
    models = [await stored.model(LoraSpec(0, 1)) for _ in range(4)]
    kind, body = RequestKind.SAVE_WEIGHTS_FOR_SAMPLER, SaveSamplerBody(sampling_session_seq_id=0).to_bytes()
    saves = [await journal.submit(stored.store, model, 1, kind, body) for model in models]
    behind = [await journal.submit_pass(stored.store, model, 2) for model in models]
    await all_done(stored, behind)  # so their captures are recorded
    after = stored.new_engine()
    after.workers.sizes, after.workers.captured.most = stored.workers.sizes, 7
    after.samplers.takes_captured = True
    after.samplers.going_on.clear()
    await after.until(lambda: len(after.workers.asked("persist")) == len(models))
    assert after.workers.most_captured == 6
    after.samplers.going_on.set()
    await all_done(after, saves)
    await after.until(lambda: not after.workers.held)
    assert after.samplers.lent == {}
