"""Memory runs out in one of two ranks or both, at any point of a pass: both refuse it, and nothing is left.

The ranks are processes of their own, over gloo. Each trains models beside twins that never meet a shortage.
"""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import Datum, LoraSpec, PassItem
from skyrl_tinker.training import distributed
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.batching.outputs import RankOutput
from skyrl_tinker.training.distributed import MeetingPlace, Ranks
from skyrl_tinker.training.memory import allocator
from skyrl_tinker.training.models import fsdp_state
from skyrl_tinker.training.models.fsdp_state import RowCollectives
from skyrl_tinker.training.models.full_parameter import FullModel
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.trainable_model import Part, TrainableModel
from skyrl_tinker.training.passes import pass_runner
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.training.support.passes import make_data, make_item, perturb

SPECS = {1: LoraSpec(8, 1), 2: LoraSpec(4, 2, train_attn=False), 3: LoraSpec(0, 3)}
TWINS = 10
BUDGET = 64
LENGTHS = (60, 40, 12, 30)
Found = tuple[str, bool, list[str]]
"""Where memory ran out, whether the pass was refused, and what was different afterwards."""
OVERFLOWING = Datum(np.arange(30, dtype=np.int32), np.arange(30), {"weights": np.full(30, 3e37, np.float32)})
"""Its loss is finite, its gradients are not."""


def _items(seed: int, offset: int = 0) -> list[PassItem]:
    """Rows of the shared base and of a network of its own; one loss needs a forward pass of its own."""
    return [
        make_item(1 + offset, make_data(LENGTHS, seed)),
        make_item(2 + offset, make_data(LENGTHS, seed + 1, "clip_cov"), "clip_cov", seq_id=1),
        make_item(3 + offset, make_data(LENGTHS, seed + 2)),
    ]


def _overflowing(offset: int = 0) -> list[PassItem]:
    return [make_item(2 + offset, (OVERFLOWING,), seq_id=2), make_item(1 + offset, make_data((20,), 9))]


def _short(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("made up")


class Calls:
    """Calls of a function of which one, by its number, finds no memory."""

    def __init__(self, function: Callable[..., Any], failing: int) -> None:
        self._function, self._failing = function, failing
        self.made = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.made += 1
        return _short() if self.made == self._failing else self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return lambda *args, **kwargs: self(instance, *args, **kwargs)


@contextmanager
def _replaced(owner: Any, name: str, failing: int) -> Iterator[Calls]:
    calls = Calls(getattr(owner, name), failing)
    with patch.object(owner, name, calls):
        yield calls


@contextmanager
def _in_backward(layer: nn.Module) -> Iterator[None]:
    """Not in the row after it: that of the same layer, without tokens, has the memory."""
    gradient = Calls(lambda gradient: gradient, 1)

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        result = output if isinstance(output, torch.Tensor) else output[0]
        if result.requires_grad:
            result.register_hook(lambda found: gradient(found))

    handle = layer.register_forward_hook(hook)
    yield
    handle.remove()


@contextmanager
def _for_few_gradients(network: nn.Module) -> Iterator[None]:
    """Memory for the gradients of a layer, not for a second set of all beside those of earlier passes."""
    layer = sum(1 for _ in network.layers[0].parameters())

    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        held = sum(parameter.grad is not None for parameter in network.parameters())
        return _short() if held > layer else DefaultAllocMixin.allocate(*args, **kwargs)

    with patch.object(fsdp_state._ReduceScatter, "allocate", allocate):
        yield


@contextmanager
def _until_given_back() -> Iterator[None]:
    """No memory for a copy of gradients, nor for the pass's own tensors before memory is given back."""
    zeros, give_back = torch.zeros, allocator.give_back
    short = False

    def begin(*_: Any) -> None:
        nonlocal short
        short = True
        _short()

    def enough() -> None:
        nonlocal short
        short = False
        give_back()

    with (
        patch.object(LoraModel, "_keep_gradients", begin),
        patch.object(allocator, "give_back", enough),
        patch.object(torch, "zeros", lambda *args, **kwargs: (_short if short else zeros)(*args, **kwargs)),
    ):
        yield


@contextmanager
def _noted_rows(calls: Calls) -> Iterator[list[int]]:
    """Note how many calls were made before each row."""
    begin, rows = RowCollectives.begin, list[int]()

    def noted(row: RowCollectives) -> None:
        rows.append(calls.made)
        begin(row)

    with patch.object(RowCollectives, "begin", noted):
        yield rows


class Disturbed:
    """One rank with its models and their twins."""

    def __init__(self, directory: str, ranks: Ranks, recompute: bool) -> None:
        spec = TrainerSpec(directory, 2, "cpu", "float32", 1, BUDGET, gradient_checkpointing=recompute)
        self.worker = Worker(spec, ranks.rank)
        self.worker.attach(ranks)
        for model, lora in SPECS.items():
            one, twin = (self._create(key, lora) for key in (model, model + TWINS))
            perturb(self.worker, model)
            for name in one.shapes():
                twin.write(Part.WEIGHT, name, one.read(Part.WEIGHT, name))

    def _create(self, key: int, spec: LoraSpec) -> TrainableModel:
        self.worker.create_model(ModelKey(key), spec)
        return self.worker._models[ModelKey(key)]

    def run(self, seed: int, offset: int = 0) -> RankOutput:
        return self.run_items(_items(seed, offset))

    def run_items(self, items: Sequence[PassItem]) -> RankOutput:
        return self.worker.run_pass(build_batch(items))

    def network(self, model: int) -> Any:
        found = self.worker._models[ModelKey(model)]
        return found.network if isinstance(found, FullModel) else self.worker._base

    def differs(self, seed: int) -> list[str]:
        """Run a pass of all and of their twins; tell what differs then, to the last bit."""
        found, expected = self.run(seed), self.run(seed, TWINS)
        wrong = [] if np.array_equal(found.logprobs, expected.logprobs) else ["logprobs"]
        wrong += [] if found.metrics == expected.metrics else ["metrics"]
        wrong += [] if not found.failures and not expected.failures else ["failures"]
        for model in SPECS:
            one, other = (
                self.worker._models[ModelKey(key)]._local_gradients() for key in (model, model + TWINS)
            )
            same = len(one) == len(other) and all(map(torch.equal, one, other))
            wrong += [] if same else [f"gradients of {model}"]
        return wrong


def _points(rank: Disturbed, allocations: int) -> Iterator[tuple[str, Any]]:
    """Places in a pass, each as a context in which memory runs out there."""
    for number in range(1, allocations + 1):
        yield f"allocation {number} for a collective", _replaced(DefaultAllocMixin, "allocate", number)
    for model, layer in itertools.product((1, 3), (0, -1)):
        layers = rank.network(model).layers
        yield f"backward of layer {layer} of {model}", _in_backward(layers[layer])
    yield "a loss", _replaced(pass_runner, "row_loss", 2)
    yield "a loss over a request", _replaced(pass_runner, "whole_loss", 1)
    yield "the copy of the gradients", _replaced(LoraModel, "_keep_gradients", 2)
    yield "the copy, until memory is given back", _until_given_back()
    yield "the last look", _replaced(pass_runner._Attempt, "read", 1)
    yield "a second set of gradients", _for_few_gradients(rank.network(3))


def _on_rank(directory: str, place: MeetingPlace, rank: int, every: int) -> list[Found]:
    """In a process of its own."""
    ranks = distributed.join(place, rank, 2, "cpu", 60.0)
    found = [result for recompute in (False, True) for result in _disturb(directory, ranks, recompute, every)]
    dist.destroy_process_group()
    return found


def _disturb(directory: str, ranks: Ranks, recompute: bool, every: int) -> list[Found]:
    one = Disturbed(directory, ranks, recompute)
    assert not one.differs(1)
    with _replaced(DefaultAllocMixin, "allocate", 0) as calls, _noted_rows(calls) as rows:
        one.run(2)
    one.run(2, TWINS)
    found = []
    for number, (name, context) in enumerate(list(_points(one, calls.made))[-1 - recompute :: -every]):
        with context if number % 2 == ranks.rank else nullcontext():
            output = one.run(3)
        found.append((name, output.exhausted, one.differs(number)))
    for number, (before, last) in enumerate(list(itertools.pairwise([*rows, calls.made]))[::-every]):
        with _replaced(DefaultAllocMixin, "allocate", before + 1 if number % 2 == ranks.rank else last):
            output = one.run(3)
        found.append(
            (f"allocations {before + 1} and {last}, on a rank each", output.exhausted, one.differs(0))
        )
    with _replaced(LoraModel, "gradients_finite", 1):  # which one rank asks for
        output = one.run_items(_overflowing())
    found.append(("the search for what overflowed", output.exhausted, one.differs(0)))
    assert not one.run_items(_overflowing()).exhausted
    return found


def _on_both(directory: str, scratch: str, every: int) -> Sequence[list[Found]]:
    place = distributed.meeting_place(scratch)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_on_rank, (directory,) * 2, (place,) * 2, (0, 1), (every,) * 2))


@pytest.mark.parametrize("every", [32, pytest.param(1, marks=pytest.mark.long)])
def test_both_ranks_refuse_the_pass_and_nothing_is_left_of_it(
    untied_model: str, tmp_path: Path, every: int
) -> None:
    one, other = _on_both(untied_model, str(tmp_path), every)
    assert len(one) > 60 // every
    assert one == other == [(name, True, []) for name, _, _ in one]
