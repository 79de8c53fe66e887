"""The trainer through Ray: real actors, real process groups."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, LoraSpec, PassItem, PassOutput, StepItem
from skyrl_tinker.errors import (
    ExhaustedError,
    RankDiedError,
    SamplerError,
    StorageAwayError,
    StorageError,
    TrainerError,
    UserError,
)
from skyrl_tinker.system.user_directory import user_directory
from skyrl_tinker.training import actors
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from tests.support.waiting import until
from tests.training.support.passes import make_data, make_item
from tests.training.support.saves import publish_weights, published_weights, save_state

A, B, FULL = ModelKey(1), ModelKey(2), ModelKey(3)
SPECS = {A: LoraSpec(8, 1), B: LoraSpec(4, 2, train_mlp=False, train_attn=False), FULL: LoraSpec(0, 0)}


@pytest.fixture(scope="module")
def groups(ray_cluster: None, tied_model: str) -> Iterator[tuple[TrainerGroup, TrainerGroup]]:
    """Groups of one rank and of two, started side by side."""
    both = tuple(TrainerGroup.launch(_spec(tied_model, ranks)) for ranks in (1, 2))
    for group in both:
        asyncio.run(group.ready())
    yield both
    for group in both:
        asyncio.run(group.shutdown())


@pytest.fixture
async def one(groups: tuple[TrainerGroup, TrainerGroup]) -> AsyncIterator[TrainerGroup]:
    yield groups[0]
    await _release_all(groups[0])


@pytest.fixture
async def two(groups: tuple[TrainerGroup, TrainerGroup]) -> AsyncIterator[TrainerGroup]:
    yield groups[1]
    await _release_all(groups[1])


def _spec(directory: str, ranks: int) -> TrainerSpec:
    return TrainerSpec(directory, ranks, "cpu", "float32", 1, token_budget=64, timeout_s=30.0)


async def _release_all(group: TrainerGroup) -> None:
    for model in SPECS:
        await group.release(model)


async def _pass(group: TrainerGroup, *items: PassItem) -> list[PassOutput]:
    outputs = (await group.run_pass(group.prepare(items))).outputs
    assert all(isinstance(output, PassOutput) for output in outputs), outputs
    return [output for output in outputs if isinstance(output, PassOutput)]


def _units(number: int) -> list[tuple[PassItem, ...]]:
    """Passes of every shape: mixed, forward-only, on one model, and with fewer datums than ranks."""
    return [
        (
            make_item(B, make_data((40, 30), number, "ppo"), "ppo"),
            make_item(A, make_data((50, 9, 60, 33), number)),
            make_item(FULL, make_data((20, 50), number)),
            make_item(A, make_data((12, 12), number), backward=False),
        ),
        (make_item(B, make_data((40,), number + 10)),),
        (make_item(FULL, make_data((1,), number + 20)),),
    ]


Trained = tuple[list[PassOutput], list[dict[str, float]], dict[str, np.ndarray]]


async def _train(group: TrainerGroup, tmp_path: Path) -> Trained:
    outputs, metrics = [], []
    adam = AdamParams(1e-2, weight_decay=0.1, grad_clip_norm=0.5, eps=1e-3)
    for model, spec in SPECS.items():
        await group.create_model(model, spec)
    for number in range(2):
        for items in _units(number):
            outputs += await _pass(group, *items)
        steps = await group.optim_step([StepItem(RequestId("s"), model, adam) for model in SPECS])
        metrics += [dict(output.metrics) for output in steps]
    await publish_weights(group, FULL, tmp_path / "full")
    await save_state(group, FULL, str(tmp_path / "state"), optimizer=True)
    return outputs, metrics, await published_weights(group, A)


async def test_two_ranks_equal_one(one: TrainerGroup, two: TrainerGroup, tmp_path: Path) -> None:
    results = [await _train(group, tmp_path / str(group.spec.ranks)) for group in (one, two)]
    (outputs, metrics, adapter), (outputs2, metrics2, adapter2) = results
    for output, other in zip(outputs, outputs2, strict=True):
        assert output.metrics == pytest.approx(other.metrics, rel=1e-5, abs=1e-3)
        for found, expected in zip(output.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    for one_step, two_step in zip(metrics, metrics2, strict=True):
        assert one_step == pytest.approx(two_step, rel=1e-5)
    assert adapter.keys() == adapter2.keys()
    for name, array in adapter.items():
        np.testing.assert_allclose(adapter2[name], array, atol=1e-5, rtol=0, err_msg=name)


async def test_a_checkpoint_of_two_ranks_loads_on_one(
    one: TrainerGroup, two: TrainerGroup, tmp_path: Path
) -> None:
    probe = make_item(FULL, make_data((30, 20), 7), backward=False)
    await _train(two, tmp_path)
    (before,) = await _pass(two, probe)
    await one.create_model(FULL, SPECS[FULL])
    await one.load_state(FULL, str(tmp_path / "state"), optimizer=True)
    (after,) = await _pass(one, probe)
    for found, expected in zip(after.logprobs, before.logprobs, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


async def test_a_request_failing_on_one_rank_is_dropped_on_all(two: TrainerGroup) -> None:
    data = make_data((60, 60), 1, "importance_sampling")
    data[1].inputs["logprobs"][:] = -1e5  # lands on the second rank
    adapters = []
    for model, items in ((A, [make_item(A, data, "importance_sampling")]), (B, [])):
        await two.create_model(model, LoraSpec(8, 1))
        prepared = two.prepare([make_item(model, make_data((40, 30), 2)), *items])
        outputs = (await two.run_pass(prepared)).outputs
        assert [isinstance(output, PassOutput) for output in outputs] == [True, *(False for _ in items)]
        await two.optim_step([StepItem(RequestId("s"), model, AdamParams(1e-2))])
        adapters.append(await published_weights(two, model))
    for name, array in adapters[0].items():
        np.testing.assert_array_equal(adapters[1][name], array)


async def test_a_user_error_leaves_the_group_whole(two: TrainerGroup, tmp_path: Path) -> None:
    await two.create_model(A, SPECS[A])
    with pytest.raises(UserError, match="no checkpoint at"):
        await two.load_state(A, str(tmp_path), optimizer=True)
    await _pass(two, make_item(A, make_data((30,), 1)))


async def test_a_disk_that_fails_one_rank_leaves_the_group_whole(two: TrainerGroup, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    await two.create_model(FULL, SPECS[FULL])
    with pytest.raises(StorageError, match="rank 0 could not write the checkpoint: Not a directory"):
        await save_state(two, FULL, str(tmp_path / "file" / "c"), optimizer=True)
    with pytest.raises(StorageError, match="rank 0 could not write the checkpoint: Not a directory"):
        await publish_weights(two, FULL, tmp_path / "file" / "c")
    assert await save_state(two, FULL, str(tmp_path / "c"), optimizer=True) > 0


@pytest.fixture
async def apart(
    two: TrainerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TrainerGroup]:
    """Two ranks, the second as if on another host, which does not share `tmp_path`."""
    ranks = two._ranks
    with monkeypatch.context() as patch:
        patch.setattr(ranks._placement, "nodes", ("here", "elsewhere"))
        assert await ranks.look_for({str(tmp_path): "a mark that is not there"}) == {str(tmp_path)}
        yield two
        await ranks.look_for({})


def _carried(tmp_path: Path) -> list[Path]:
    place = user_directory(Path(tempfile.gettempdir()), Path("/dev/shm")) / "carried"
    return [path for path in place.rglob("*") if path.is_file() and tmp_path.name in path.parts]


async def test_ranks_of_a_host_that_shares_nothing_send_and_get_files(
    apart: TrainerGroup, one: TrainerGroup, tmp_path: Path
) -> None:
    directory = str(tmp_path / "c")
    for group in (apart, one):
        await group.create_model(FULL, SPECS[FULL])
    item = make_item(FULL, make_data((30, 30), 1))
    await _pass(apart, item)
    await apart.optim_step([StepItem(RequestId("s"), FULL, AdamParams(1e-2))])
    await save_state(apart, FULL, directory, optimizer=True)
    (expected,) = await _pass(apart, item)
    await apart.optim_step([StepItem(RequestId("s"), FULL, AdamParams(1e-2))])
    for group in (apart, one):  # which reads what both have written
        await group.load_state(FULL, directory, optimizer=True)
        (found,) = await _pass(group, item)
        np.testing.assert_allclose(found.logprobs[0], expected.logprobs[0], atol=1e-5)
    assert not _carried(tmp_path)


async def test_a_host_without_room_leaves_group_and_model_as_they_were(
    apart: TrainerGroup, tmp_path: Path
) -> None:
    await apart.create_model(A, SPECS[A])
    await save_state(apart, A, str(tmp_path / "c"), optimizer=True)
    scratch = user_directory(Path(tempfile.gettempdir()), Path("/dev/shm")) / "carried"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    scratch.touch()  # as little room as on a full disk
    with pytest.raises(StorageAwayError, match="cannot be copied to another host: rank 1 failed in write"):
        await apart.load_state(A, str(tmp_path / "c"), optimizer=True)
    scratch.unlink()
    assert apart.broken is None
    await apart.load_state(A, str(tmp_path / "c"), optimizer=True)


async def test_files_are_verified_beside_what_the_ranks_compute(one: TrainerGroup, tmp_path: Path) -> None:
    """So peers wait for no rank whose disk is slow."""
    await one.create_model(A, SPECS[A])
    await save_state(one, A, str(tmp_path / "c"), optimizer=True)
    next((tmp_path / "c").glob("*.safetensors")).write_bytes(b"")
    running = asyncio.ensure_future(one.run_pass(one.prepare([make_item(A, make_data((512,) * 100, 1))])))
    with pytest.raises(UserError, match="is damaged"):
        await one.load_state(A, str(tmp_path / "c"), optimizer=True)
    assert not running.done()
    await running


async def test_ping_answers_while_a_pass_runs(one: TrainerGroup) -> None:
    await one.create_model(A, SPECS[A])
    prepared = one.prepare([make_item(A, make_data((512,) * 100, 1))])
    running = asyncio.ensure_future(one.run_pass(prepared))
    await asyncio.sleep(0.05)
    await one._ranks.ping()
    assert not running.done()
    await running


def make_echo() -> type:
    """Made here, so that it travels whole: the ranks cannot import tests."""

    class Echo:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def say(self, word: str) -> tuple[int, str]:
            return self.rank, word

        def fail(self) -> None:
            raise ValueError("broken wire")

    return Echo


async def test_a_sender_works_while_a_pass_runs(one: TrainerGroup) -> None:
    await one.create_model(A, SPECS[A])
    await one.open_sender(make_echo())
    running = asyncio.ensure_future(one.run_pass(one.prepare([make_item(A, make_data((512,) * 100, 1))])))
    await asyncio.sleep(0.05)
    assert await one.sender_call("say", "hello") == [(0, "hello")]
    assert not running.done()
    await running


async def test_a_failing_sender_leaves_the_group_whole(two: TrainerGroup) -> None:
    await two.open_sender(make_echo())
    assert await two.sender_call("say", "hello") == [(0, "hello"), (1, "hello")]
    with pytest.raises(SamplerError, match=r"rank 0 failed in sending weights \(fail\): .*broken wire"):
        await two.sender_call("fail")
    assert await two.root_call("say", "again") == (0, "again")
    await two.create_model(A, SPECS[A])
    await _pass(two, make_item(A, make_data((30, 30), 1)))


async def test_a_released_model_has_no_state(one: TrainerGroup) -> None:
    await one.create_model(A, SPECS[A])
    await one.release(A)
    (output,) = (await one.run_pass(one.prepare([make_item(A, make_data((30,), 1))]))).outputs
    assert not isinstance(output, PassOutput)
    assert output.category == "server"


async def test_a_killed_rank_raises_at_once_and_names_itself(ray_cluster: None, tied_model: str) -> None:
    group = TrainerGroup.launch(_spec(tied_model, 2))
    await group.ready()
    await group.create_model(A, SPECS[A])
    pids = group.pids()
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(TrainerError, match=r"^rank 1 died in run_pass: its process ended unexpectedly$"):
        await _pass(group, make_item(A, make_data((30, 30), 1)))
    assert time.monotonic() - started < 30
    await group.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_ranks_take_their_places_when_they_start_and_give_them_back(
    groups: tuple[TrainerGroup, TrainerGroup], tied_model: str
) -> None:
    free = ray.cluster_resources()["CPU"] - sum(len(each.pids()) for each in groups)
    await until(lambda: _free() == free)  # a moment after the last group of another test has ended
    group = TrainerGroup.launch(_spec(tied_model, 2))
    with pytest.raises(TrainerError, match="are not running"):
        await group.create_model(A, SPECS[A])
    assert _free() == free
    for _ in range(2):
        await group.ready()
        await until(lambda: _free() == free - 2)
        await group.shutdown()
        await until(lambda: _free() == free)


def _free() -> float:
    """CPUs that nobody has reserved, as Ray tells a moment later."""
    return float(ray.available_resources().get("CPU", 0.0))


async def test_a_missing_base_model_names_rank_and_cause_and_may_come_later(
    ray_cluster: None, tied_model: str, tmp_path: Path
) -> None:
    group = TrainerGroup.launch(_spec(str(tmp_path / "late"), 1))
    with pytest.raises(TrainerError, match="rank 0 failed in join: OSError"):
        await group.ready()
    await group.shutdown()
    with pytest.raises(TrainerError, match="are not running"):
        await group.create_model(A, SPECS[A])
    shutil.copytree(tied_model, tmp_path / "late")
    await group.ready()
    await group.create_model(A, SPECS[A])
    await group.shutdown()


def test_the_engine_side_imports_no_torch() -> None:
    code = "import sys, skyrl_tinker.training.trainer_group; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_launch_without_ray_is_refused() -> None:
    code = (
        "from skyrl_tinker.training.trainer_group import *\n"
        "try: TrainerGroup.launch(TrainerSpec('x', 1, 'cpu', 'float32', 1, 64))\n"
        "except Exception as error: assert 'ray.init' in str(error)\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_breaks_the_ranks_is_told_before_what_one_of_them_refuses() -> None:
    died, failed = RankDiedError("rank 2 died"), TrainerError("rank 1 failed")
    short, wrong = ExhaustedError("no memory"), UserError("no such layer")
    assert actors._root_cause([wrong, short, failed, died]) is died
    assert actors._root_cause([wrong, short, failed]) is failed
    assert actors._root_cause([wrong, short]) is short
    assert actors._root_cause([wrong, wrong]) is wrong
