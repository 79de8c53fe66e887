"""Memory runs out in one of two ranks, outside of passes: both refuse the same, and it leaves no trace.

The ranks are processes of their own, over gloo, which hold one adapter on the device at a time.
"""

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import UntypedStorage, nn

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.manifest import FileEntry
from skyrl_tinker.domain.values import AdamParams, Datum, DimuonParams, LoraSpec, OptimizerFamily
from skyrl_tinker.errors import ExhaustedError
from skyrl_tinker.training import distributed
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.checkpoints import checkpoint_load
from skyrl_tinker.training.distributed import MeetingPlace
from skyrl_tinker.training.memory.offload import storages
from skyrl_tinker.training.models.trainable_model import HostCopy, Part
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.training.support.passes import make_data, make_item, step

pytestmark = pytest.mark.long
ADAPTER, OTHER, FULL, DIMUON, NEW = 1, 2, 3, 4, 5
SPECS = {ADAPTER: LoraSpec(8, 1), OTHER: LoraSpec(4, 2), FULL: LoraSpec(0, 3), DIMUON: LoraSpec(4, 4)}
FAMILIES: Mapping[int, OptimizerFamily] = {DIMUON: "dimuon"}
PARAMS = {"adamw": AdamParams(1e-2), "dimuon": DimuonParams(1e-2)}
State = tuple[int, bool, list[torch.Tensor]]
Answers = list[tuple[str, str]]
"""By operation, the error with which it was refused."""


def _short(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("made up")


def _short_of_room(resize: Callable[..., Any]) -> Callable[..., Any]:
    return lambda storage, size: _short() if size else resize(storage, size)


def _nowhere_to_load() -> Any:
    return patch.object(UntypedStorage, "resize_", _short_of_room(UntypedStorage.resize_))


@contextmanager
def _second_copy_fails() -> Iterator[None]:
    copy, made = HostCopy.__call__, list[torch.Tensor]()

    def counted(self: HostCopy, tensor: torch.Tensor) -> torch.Tensor:
        made.append(tensor)
        return _short() if len(made) == 2 else copy(self, tensor)

    with patch.object(HostCopy, "__call__", counted):
        yield


class Rank:
    """One rank. Of what it is asked, `refused` runs out of memory on the rank `short`."""

    def __init__(self, directory: str, place: MeetingPlace, rank: int, short: int) -> None:
        self._ranks = distributed.join(place, rank, 2, "cpu", 60.0)
        self.worker = Worker(TrainerSpec(directory, 2, "cpu", "float32", 1, 64, resident_models=1), rank)
        self.worker.attach(self._ranks)
        self._is_short = rank == short
        self.answers: Answers = []

    def create(self, key: int, spec: LoraSpec, optimizer: OptimizerFamily = "adamw") -> None:
        """As the engine does, which releases a model that a rank could not make."""
        try:
            self.worker.create_model(ModelKey(key), spec, optimizer)
            error = ""
        except ExhaustedError as found:
            error = str(found)
        errors = [content.decode() for content in self._ranks._gather(error.encode())]
        if any(errors):
            self.worker.release(ModelKey(key))
            raise ExhaustedError(next(filter(None, errors)))

    def train(self, key: int, data: tuple[Datum, ...]) -> None:
        output = self.worker.run_pass(build_batch([make_item(key, data)]))
        assert not output.failures

    def step(self, key: int) -> None:
        output = step(self.worker, key, PARAMS[FAMILIES.get(key, "adamw")])
        assert output.exhausted == (output.error is not None)
        if output.error is not None:
            raise ExhaustedError(output.error)

    def state(self) -> dict[int, State]:
        """Copies of all that the models are."""
        found: dict[int, State] = {}
        for key in SPECS:
            model = self.worker._model_to_read(ModelKey(key))
            parts = (Part.WEIGHT, *(model.moments if model.step else ()))
            tensors = [*model._local_gradients(), *(each for part in parts for each in model.local(part))]
            found[key] = model.step, model.has_gradients, [tensor.clone() for tensor in tensors]
        return found

    def refused(self, operation: Callable[[], object], *shortages: Any) -> None:
        """Require that memory runs out at each place, with no trace; then that the operation succeeds."""
        for shortage in shortages:
            before, held = self.state(), len(self.worker._captured)
            with shortage if self._is_short else nullcontext(), pytest.raises(ExhaustedError) as found:
                operation()
            self.answers.append((str(found.value).partition(":")[0], str(found.value)))
            assert _same(self.state(), before)
            assert len(self.worker._captured) == held
        operation()

    def close(self) -> None:
        dist.destroy_process_group()


def _same(found: Mapping[int, State], expected: Mapping[int, State]) -> bool:
    return all(
        one[:2] == other[:2] and len(one[2]) == len(other[2]) and all(map(torch.equal, one[2], other[2]))
        for one, other in zip(found.values(), expected.values(), strict=True)
    )


def _run(directory: str, scratch: str, place: MeetingPlace, rank: int, short: int) -> Answers:
    """In a process of its own."""
    torch.set_num_threads(1)
    one = Rank(directory, place, rank, short)
    for key, spec in SPECS.items():
        one.create(key, spec, FAMILIES.get(key, "adamw"))
    _refuse_models(one)
    for key in SPECS:
        one.train(key, make_data((20, 9), key))
    _refuse_steps(one)
    _refuse_copies(one, scratch)
    for key in SPECS:
        one.train(key, make_data((8, 5), key))
    _refuse_loads(one, scratch)
    _refuse_to_restore(one)
    one.close()
    return one.answers


def _refuse_models(one: Rank) -> None:
    no_tensors = patch.object(nn.init, "kaiming_uniform_", _short)
    one.refused(lambda: one.create(NEW, LoraSpec(8, 1)), no_tensors)
    one.worker.release(ModelKey(NEW))
    one.refused(lambda: one.create(NEW, LoraSpec(0, 1)), patch.object(nn.Module, "to_empty", _short))
    one.worker.release(ModelKey(NEW))


def _refuse_steps(one: Rank) -> None:
    """`state` leaves the last adapter on the device alone."""
    no_moments = patch.object(torch, "zeros_like", _short)
    for key in SPECS:
        shortages = [*([_nowhere_to_load()] if key == ADAPTER else []), no_moments]
        if key in FAMILIES:
            shortages.append(patch.object(torch.Tensor, "new_empty", _short))
        one.refused(partial(one.step, key), *shortages)


def _refuse_copies(one: Rank, scratch: str) -> None:
    numbers = {ModelKey(key): 10 + key for key in SPECS}
    durable = dict.fromkeys(numbers, True)
    worker = one.worker
    one.refused(
        lambda: worker.capture_state(ModelKey(FULL), 1, True),
        _second_copy_fails(),
        patch.object(torch.Tensor, "new_empty", _short),
    )
    one.refused(lambda: worker.capture_export(ModelKey(FULL), 2, 1 << 30), _second_copy_fails())
    one.refused(lambda: worker.capture_state(ModelKey(ADAPTER), 3, True), _nowhere_to_load())
    one.refused(lambda: worker.capture_weights(numbers, durable), _second_copy_fails())
    for key, number in ((FULL, 1), (ADAPTER, 3)):
        files = worker.persist_state(number, f"{scratch}/new-{key}")
        parts = one._ranks._gather(
            json.dumps({name: asdict(entry) for name, entry in files.items()}).encode()
        )
        if worker.rank == 0:
            listed = {name: FileEntry(**entry) for part in parts for name, entry in json.loads(part).items()}
            worker.commit_state(number, listed, f"{scratch}/new-{key}", f"{scratch}/{key}")
    one._ranks.any_([True])  # the checkpoints are there
    for number in tuple(worker._captured):
        worker.drop_captured(number)


@contextmanager
def _counted_reads() -> Iterator[list[int]]:
    """Numbers of elements that are read of a checkpoint."""
    fill, sizes = checkpoint_load._fill, list[int]()

    def counted(model: Any, parts: Any, read: checkpoint_load.Read) -> None:
        def noted(key: str, rows: slice) -> torch.Tensor:
            found = read(key, rows)
            sizes.append(found.numel())
            return found

        fill(model, parts, noted)

    with patch.object(checkpoint_load, "_fill", counted):
        yield sizes


def _refuse_loads(one: Rank, scratch: str) -> None:
    for key in (FULL, ADAPTER):
        one.refused(
            partial(one.worker.load_state, ModelKey(key), f"{scratch}/{key}", True),
            patch.object(checkpoint_load.torch, "empty", _short),
            *([_nowhere_to_load()] if key == ADAPTER else []),
        )
    with _counted_reads() as sizes:
        one.worker.load_state(ModelKey(FULL), f"{scratch}/{FULL}", True)
    model = one.worker._models[ModelKey(FULL)]
    shares = [each for part in (Part.WEIGHT, *model.moments) for each in model.local(part)]
    assert sum(sizes) == sum(share.numel() for share in shares), "of its own share alone"


def _refuse_to_restore(one: Rank) -> None:
    worker = one.worker
    one.train(OTHER, make_data((8, 5), 1))
    before = one.state()
    worker.offload()
    with _nowhere_to_load() if one._is_short else nullcontext():
        with pytest.raises(ExhaustedError, match="made up"):
            worker.onload()
        tensors = [*worker._base.parameters(), *worker._models[ModelKey(OTHER)].tensors()]
        assert sum(each.nbytes() for each in storages(tensors)) == 0
        output = step(worker, OTHER)
        assert output.exhausted
        one.answers.append(("optim_step", str(output.error)))
    assert _same(one.state(), before), "which has it restored"


@pytest.mark.parametrize("short", [0, 1])
def test_both_ranks_refuse_what_one_has_no_memory_for(
    untied_model: str, tmp_path_factory: pytest.TempPathFactory, short: int
) -> None:
    scratch = str(tmp_path_factory.mktemp("scratch"))
    place = distributed.meeting_place(scratch)
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(2, multiprocessing.get_context("spawn")))
        calls = [pool.submit(_run, untied_model, scratch, place, rank, short) for rank in (0, 1)]
        one, other = (call.result() for call in calls)
    assert one == other
    assert {name for name, _ in one} == {
        "create_model",
        "optim_step",
        "save_weights",
        "save_weights_external",
        "save_weights_for_sampler",
        "load_weights",
    }
    assert all("a trainer rank ran out of memory (made up)" in error for _, error in one)
