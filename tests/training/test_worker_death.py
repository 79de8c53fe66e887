"""Ranks that are killed, as the kernel does when memory runs out: clients only see a pause."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import (
    AdamParams,
    AdapterWeights,
    Failure,
    LoraSpec,
    PassItem,
    PassOutput,
    StepItem,
    StepOutput,
)
from skyrl_tinker.errors import TrainerError, UnitFailedError
from skyrl_tinker.training.restart_policy import RestartPolicy
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from tests.training.support.passes import make_data, make_item
from tests.training.test_trainer_group import make_echo

A, B, FULL, TWIN = (ModelKey(number) for number in (1, 2, 3, 4))
SPECS = {A: LoraSpec(8, 1), B: LoraSpec(4, 2, train_mlp=False), FULL: LoraSpec(0, 0)}
BUDGET = 64
LENGTHS = (40, 50, 60, 33)
"""One datum to a row of BUDGET tokens and to one of half of them: what is retried is the same to the bit."""
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def groups(
    ray_cluster: None, tied_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, TrainerGroup]]:
    """Groups of one rank and of two, started side by side."""
    root = tmp_path_factory.mktemp("trainers")
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
                state_dir=str(root / str(ranks)),
            )
        )
        for ranks in (1, 2)
    }
    for group in found.values():
        asyncio.run(group.ready())
    yield found
    for group in found.values():
        asyncio.run(group.shutdown())
    assert not list(root.iterdir())


@pytest.fixture
async def one(groups: dict[int, TrainerGroup]) -> AsyncIterator[TrainerGroup]:
    yield groups[1]
    await _release_all(groups[1])


@pytest.fixture
async def two(groups: dict[int, TrainerGroup]) -> AsyncIterator[TrainerGroup]:
    yield groups[2]
    await _release_all(groups[2])


async def _release_all(group: TrainerGroup) -> None:
    for model in (*SPECS, TWIN):
        await group.release(model)


def _item(model: ModelKey, seed: int) -> PassItem:
    return make_item(model, make_data(LENGTHS, seed))


async def _pass(group: TrainerGroup, *items: PassItem) -> list[PassOutput | Failure]:
    return (await group.run_pass(group.prepare(items))).outputs


async def _step(group: TrainerGroup) -> list[StepOutput | Failure]:
    return await group.optim_step([StepItem(RequestId("s"), model, AdamParams(1e-2)) for model in SPECS])


async def _kill(group: TrainerGroup) -> None:
    """The last rank; the others find out."""
    os.kill(group.pids()[-1], signal.SIGKILL)


async def _kill_noticed(group: TrainerGroup, work: Coroutine[Any, Any, Any]) -> Any:
    await _kill(group)
    await group.watch(PATIENCE_S)
    return await work


async def _kill_within(group: TrainerGroup, work: Coroutine[Any, Any, Any]) -> Any:
    """The last rank stands still, so that its peers cannot be through before it dies."""
    os.kill(group.pids()[-1], signal.SIGSTOP)
    running = asyncio.create_task(work)
    await asyncio.sleep(0.3)
    await _kill(group)
    return await running


async def _kill_hanging(group: TrainerGroup, work: Coroutine[Any, Any, Any]) -> Any:
    """Stop the last rank: not dead, but silent; a unit waits for it."""
    os.kill(group.pids()[-1], signal.SIGSTOP)
    running = asyncio.create_task(work)
    await group.watch(patience_s=1.0)
    return await running


Disturb = Callable[[TrainerGroup, Coroutine[Any, Any, Any]], Awaitable[Any]]


async def _undisturbed(group: TrainerGroup, work: Coroutine[Any, Any, Any]) -> Any:
    return await work


Seen = tuple[list[Any], dict[ModelKey, AdapterWeights], bytes]


async def _train(group: TrainerGroup, disturb: dict[str, Disturb], directory: Path) -> Seen:
    """Two windows of two passes; `disturb`: by what is under way. All that can be seen of three models."""
    seen: list[Any] = []
    for model, spec in SPECS.items():
        await group.create_model(model, spec)
    for seed in range(4):
        work = _pass(group, *(_item(model, 10 * seed + model) for model in SPECS))
        seen += await disturb.get(f"pass {seed}", _undisturbed)(group, work)
        if seed % 2:
            seen += await disturb.get(f"step {seed}", _undisturbed)(group, _step(group))
    adapters = await disturb.get("capture", _undisturbed)(group, group.capture_adapters([A, B]))
    await group.capture_full(FULL, str(directory))
    for model in SPECS:
        await group.release(model)
    return seen, adapters, (directory / "model.safetensors").read_bytes()


def _assert_same(found: Seen, expected: Seen) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.metrics == other.metrics
        if isinstance(other, PassOutput):
            assert all((a == b).all() for a, b in zip(one.logprobs, other.logprobs, strict=True))
    for model, adapter in expected[1].items():
        for name, array in adapter.tensors.items():
            np.testing.assert_array_equal(found[1][model].tensors[name], array, err_msg=name)
    assert found[2] == expected[2]


DEATHS: dict[int, dict[str, Disturb]] = {
    1: {"pass 1": _kill_within, "step 3": _kill_hanging, "capture": _kill_noticed},
    2: {"pass 1": _kill_within, "step 3": _kill_within},
}


@pytest.mark.parametrize("ranks", DEATHS)
async def test_training_goes_on_to_the_last_bit_as_if_nobody_had_died(
    one: TrainerGroup, two: TrainerGroup, tmp_path: Path, ranks: int
) -> None:
    """Weights, moments and gradients of adapters and of a full copy, of windows before and of the same."""
    group, deaths = {1: one, 2: two}[ranks], DEATHS[ranks]
    expected = await _train(group, {}, tmp_path / "1")
    _assert_same(await _train(group, deaths, tmp_path / "2"), expected)
    assert group.restarts == len(deaths)
    assert group.retried_passes == sum("pass" in under_way for under_way in deaths)


async def _killed_twice(group: TrainerGroup, work: Coroutine[Any, Any, Any]) -> Any:
    restarts = group.restarts
    os.kill(group.pids()[-1], signal.SIGSTOP)
    running = asyncio.create_task(work)
    await asyncio.sleep(0.2)
    await _kill(group)
    while group.restarts == restarts:  # noqa: ASYNC110 (no event tells)
        await asyncio.sleep(0.001)
    await _kill(group)
    return await running


async def test_a_unit_that_kills_twice_fails_alone_and_changes_nothing(one: TrainerGroup) -> None:
    group = one
    for model in (A, TWIN):
        await group.create_model(model, SPECS[A])
        await _pass(group, _item(model, 1))
    large = make_item(A, make_data((60,) * 400, 2))
    (failure,) = await _killed_twice(group, _pass(group, large))
    assert isinstance(failure, Failure)
    assert failure.category == "server"
    assert (
        "died in run_pass: its process ended unexpectedly, also when it was run a second" in failure.message
    )
    assert "rows of 64 tokens (token_budget) and of 32" in failure.message
    for model in (A, TWIN):
        await _pass(group, _item(model, 3))
        await group.optim_step([StepItem(RequestId("s"), model, AdamParams(1e-2))])
    adapters = await group.capture_adapters([A, TWIN])
    for name, array in adapters[TWIN].tensors.items():
        np.testing.assert_array_equal(adapters[A].tensors[name], array, err_msg=name)


async def test_what_was_captured_dies_with_its_rank_and_the_sender_of_weights_is_there_again(
    two: TrainerGroup, tmp_path: Path
) -> None:
    await two.create_model(A, SPECS[A])
    await two.open_sender(make_echo(), every_rank=True)
    captured = await two.capture_state(A, optimizer=True)
    await _kill(two)
    with pytest.raises(TrainerError, match="rank 1 died in sending weights"):
        await two.sender_call("say", "hello")
    await two.watch(PATIENCE_S)
    with pytest.raises(UnitFailedError, match="before the checkpoint was written: save again"):
        await two.persist_state(captured, str(tmp_path / "c"))
    assert not os.listdir(tmp_path)
    assert await two.save_state(A, str(tmp_path / "c"), optimizer=True) > 0
    assert await two.sender_call("say", "hello") == [(0, "hello"), (1, "hello")]


async def test_state_that_is_set_aside_waits_for_its_turn(one: TrainerGroup) -> None:
    """The devices are others' meanwhile."""
    await one.create_model(A, SPECS[A])
    (before,) = await _pass(one, _item(A, 1))
    await one.offload()
    restarts = one.restarts
    await _kill(one)
    await one.watch(PATIENCE_S)
    await one.release(TWIN)
    assert one.restarts == restarts
    await one.onload()
    assert one.restarts == restarts + 1
    (after,) = await _pass(one, _item(A, 1))
    assert isinstance(before, PassOutput)
    assert isinstance(after, PassOutput)
    assert before.metrics == after.metrics


def test_ranks_that_die_as_soon_as_they_are_up_are_given_up() -> None:
    now = itertools.count(0, 25)  # seconds
    lives, cause = RestartPolicy(lambda: next(now)), TrainerError("rank 0 died")
    for _ in range(2):
        lives.died(cause)
        lives.born()
    with pytest.raises(TrainerError, match="rank 0 died; that was the 3rd time, less than 60 s after"):
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
