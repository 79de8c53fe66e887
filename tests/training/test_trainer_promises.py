"""What the engine relies on of a trainer, kept by TrainerGroup and by its stand-in alike.

The real one has one rank, in this process; test_trainer_group.py has what processes and several ranks add.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pytest

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, Failure, LoraSpec, PassItem, PassOutput, StepItem
from skyrl_tinker.errors import RankDiedError, StateLostError, StorageError, TrainerError, UserError
from skyrl_tinker.training import trainer_group
from skyrl_tinker.training.actors import RankReply
from skyrl_tinker.training.trainer_group import TrainerGroup
from skyrl_tinker.training.worker import Worker
from tests.support.scripted_trainer import ScriptedTrainer
from tests.training.conftest import MakeWorker
from tests.training.support.passes import make_data, make_item

A, B, UNKNOWN = ModelKey(1), ModelKey(2), ModelKey(9)
SPEC = LoraSpec(4, 1)


class Subject(Protocol):
    """`trainer`: under test."""

    trainer: TrainerGroup

    def die(self) -> None:
        """End its ranks."""

    def held(self) -> int:
        """Count what is captured and not dropped."""

    def fail(self, item: PassItem) -> PassItem:
        """Return the item with a loss that is not finite."""


class Scripted:
    def __init__(self) -> None:
        self.stand_in = ScriptedTrainer()
        self.trainer = cast(TrainerGroup, self.stand_in)

    def die(self) -> None:
        self.stand_in.broken = TrainerError("rank 0 died")

    def held(self) -> int:
        return len(self.stand_in.kept)

    def fail(self, item: PassItem) -> PassItem:
        self.stand_in.bad_models.add(item.model)
        return item


class OneRank:
    """Actors of a single rank, without a process of its own."""

    spread, pids = False, ()

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.dead = False

    async def join(self) -> None:
        """Wait for nothing: it is there."""

    async def wait_gone(self) -> None:
        """Wait for nothing, as `join`."""

    def kill(self) -> None:
        self.dead = True

    def apart(self, directory: str) -> list[int]:
        return []

    async def call_all(self, method: str, *args: Any) -> list[RankReply]:
        return [RankReply(await self.write_call(0, "checkpoints", method, *args), 0.0, 0.1)]

    async def write_call(self, rank: int, writer: str, method: str, *args: Any) -> Any:
        if self.dead:
            raise RankDiedError(f"rank 0 died in {method}")
        return getattr(self.worker, method)(*args)

    async def write_call_all(self, writer: str, method: str, *args: Any) -> list[Any]:
        return [await self.write_call(0, writer, method, *args)]

    async def file_call_all(self, method: str, *args: Any) -> list[Any]:
        if self.dead:
            raise RankDiedError(f"rank 0 died in {method}")
        return [getattr(self.worker.files, method)(*args, 0, 1)]


class Real:
    def __init__(self, make: Callable[[], Worker], patch: pytest.MonkeyPatch) -> None:
        patch.setattr(trainer_group, "Actors", lambda spec: OneRank(make()))
        self.trainer = TrainerGroup(make().spec, lambda: None)

    @property
    def _rank(self) -> OneRank:
        return cast(OneRank, self.trainer._ranks)

    def die(self) -> None:
        self._rank.kill()

    def held(self) -> int:
        return len(self._rank.worker._captured)

    def fail(self, item: PassItem) -> PassItem:
        data = make_data((20,), 1, "importance_sampling")
        data[0].inputs["logprobs"][:] = -1e5
        return replace(item, data=data, loss_fn="importance_sampling")


@pytest.fixture(params=["stand-in", "one rank"])
async def subject(
    request: pytest.FixtureRequest,
    make_worker: MakeWorker,
    untied_model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Subject:
    made: Subject
    if request.param == "stand-in":
        made = Scripted()
    else:
        made = Real(lambda: make_worker(untied_model), monkeypatch)
        await made.trainer.ready()
    for model in (A, B):
        await made.trainer.create_model(model, SPEC)
    return made


@pytest.fixture
def trainer(subject: Subject) -> TrainerGroup:
    return subject.trainer


def item(model: ModelKey, *lengths: int, **given: Any) -> PassItem:
    return replace(make_item(model, make_data(lengths or (20,), model), **given), request_id=name(model))


def name(model: ModelKey) -> RequestId:
    return RequestId(f"of {model}")


def step(model: ModelKey) -> StepItem:
    return StepItem(name(model), model, AdamParams(1e-2))


async def train(trainer: TrainerGroup, model: ModelKey) -> None:
    await trainer.run_pass(trainer.prepare([item(model)]))
    await trainer.optim_step([step(model)])


def contents(directory: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_outputs_come_in_the_order_of_the_items_and_shaped_as_their_targets(
    trainer: TrainerGroup,
) -> None:
    items = [item(B, 9, 30), item(A, 5), item(B, 12, backward=False)]
    result = await trainer.run_pass(trainer.prepare(items))
    assert (result.row_budget, result.exhausted) == (trainer.spec.token_budget, False)
    for given, output in zip(items, result.outputs, strict=True):
        assert isinstance(output, PassOutput)
        assert output.request_id == given.request_id
        found = [(logprobs.shape, logprobs.dtype) for logprobs in output.logprobs]
        assert found == [(datum.target_tokens.shape, np.float32) for datum in given.data]
        assert np.isfinite(output.metrics["loss:sum"])


async def test_a_pass_tells_the_row_budget_it_was_given(trainer: TrainerGroup) -> None:
    assert (await trainer.run_pass(trainer.prepare([item(A)]), 64)).row_budget == 64


async def test_a_request_of_an_unknown_model_or_without_a_finite_loss_fails_alone(subject: Subject) -> None:
    trainer = subject.trainer
    prepared = trainer.prepare([item(UNKNOWN), subject.fail(item(B)), item(A)])
    unknown, bad, fine = (await trainer.run_pass(prepared)).outputs
    assert unknown == Failure("the trainer has no state of model 9", "server")
    assert isinstance(bad, Failure)
    assert bad.category == "user"
    assert isinstance(fine, PassOutput)
    assert trainer.broken is None


async def test_outputs_of_steps_come_in_their_order(trainer: TrainerGroup) -> None:
    outputs = await trainer.optim_step([step(B), step(A)])
    assert [(output.request_id, output.error) for output in outputs] == [(name(B), None), (name(A), None)]
    assert all(isinstance(output.metrics["grad_norm"], float) for output in outputs)


CALLS: Mapping[str, Callable[[TrainerGroup], Awaitable[Any]]] = {
    "steps": lambda trainer: trainer.optim_step([step(A), step(UNKNOWN)]),
    "gradients": lambda trainer: trainer.zero_gradients([UNKNOWN]),
    "state": lambda trainer: trainer.capture_state(UNKNOWN, optimizer=True),
    "states": lambda trainer: trainer.capture_states([UNKNOWN, A], 1 << 30),
    "export": lambda trainer: trainer.capture_export(UNKNOWN, 1 << 30),
    "weights": lambda trainer: trainer.capture_weights({A: False, UNKNOWN: False}),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_for_an_unknown_model_does_nothing_for_any(subject: Subject, call: str) -> None:
    with pytest.raises(StateLostError, match="the trainer has no state of model 9"):
        await CALLS[call](subject.trainer)
    assert (subject.held(), subject.trainer.broken) == (0, None)


async def test_a_released_model_is_unknown_and_may_be_released_again(trainer: TrainerGroup) -> None:
    for _ in range(2):
        await trainer.release(A)
    with pytest.raises(StateLostError):
        await trainer.optim_step([step(A)])


async def test_a_model_that_is_there_cannot_be_made_again(trainer: TrainerGroup) -> None:
    with pytest.raises(TrainerError, match="model 1 exists already"):
        await trainer.create_model(A, SPEC)


async def capture(trainer: TrainerGroup, kind: str) -> Any:
    if kind == "weights":
        captured = await trainer.capture_weights({B: True, A: True})
        assert list(captured) == [B, A]
        await captured[B].drop()
        return captured[A]
    if kind == "states":
        several = await trainer.capture_states([A, B, UNKNOWN], 1 << 30)
        assert list(several) == [A, B]
        await several[B].drop()
        return several[A]
    if kind == "export":
        return await trainer.capture_export(A, 1 << 30)
    return await trainer.capture_state(A, optimizer=True)


@pytest.mark.parametrize("kind", ["state", "states", "export", "weights"])
async def test_captured_state_stays_whatever_the_model_does_until_it_is_dropped(
    subject: Subject, tmp_path: Path, kind: str
) -> None:
    trainer = subject.trainer
    await train(trainer, A)
    captured = await capture(trainer, kind)
    now, late = tmp_path / "now", tmp_path / "late"
    size = await trainer.persist_state(captured, str(now))
    assert size == sum(len(content) for content in contents(now).values())
    await train(trainer, A)
    await trainer.release(A)
    await trainer.persist_state(captured, str(late))
    assert contents(late) == contents(now)
    assert names(tmp_path) == ["late", "now"], "nothing else is left"
    assert subject.held() == 1
    for _ in range(2):
        await captured.drop()
    assert subject.held() == 0


async def test_a_directory_that_cannot_be_made_leaves_the_ranks_whole(
    trainer: TrainerGroup, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    captured = await trainer.capture_state(A, optimizer=True)
    with pytest.raises(StorageError, match="Not a directory"):
        await trainer.persist_state(captured, str(tmp_path / "file" / "c"))
    assert trainer.broken is None
    await trainer.persist_state(captured, str(tmp_path / "c"))


async def test_a_loaded_model_is_what_was_saved(trainer: TrainerGroup, tmp_path: Path) -> None:
    await train(trainer, A)
    await trainer.persist_state(await trainer.capture_state(A, optimizer=True), str(tmp_path / "saved"))
    await train(trainer, A)
    await trainer.load_state(A, str(tmp_path / "saved"), optimizer=True)
    await trainer.persist_state(await trainer.capture_state(A, optimizer=True), str(tmp_path / "again"))
    assert contents(tmp_path / "again") == contents(tmp_path / "saved")


async def test_a_checkpoint_that_is_not_there_is_the_users_error(
    trainer: TrainerGroup, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no checkpoint at"):
        await trainer.load_state(A, str(tmp_path / "nowhere"), optimizer=True)
    assert trainer.broken is None


async def test_broken_ranks_refuse_all_but_a_release_until_fresh_ones_without_models_are_there(
    subject: Subject, tmp_path: Path
) -> None:
    trainer = subject.trainer
    captured = await trainer.capture_state(A, optimizer=True)
    subject.die()
    for _ in range(2):
        with pytest.raises(TrainerError, match="rank 0 died"):
            await trainer.optim_step([step(A)])
    with pytest.raises(TrainerError, match="rank 0 died"):
        await trainer.run_pass(trainer.prepare([item(A)]))
    await trainer.release(A)
    assert trainer.broken is not None
    await trainer.restart()
    assert (trainer.broken, trainer.restarts) == (None, 1)
    with pytest.raises(StateLostError):
        await trainer.optim_step([step(B)])
    with pytest.raises(TrainerError, match="rank 0 died"):
        await trainer.persist_state(captured, str(tmp_path / "c"))
    assert (names(tmp_path), trainer.broken) == ([], None), "which the fresh ranks survive"
