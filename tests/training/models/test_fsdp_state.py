"""A network whose pass was aborted anywhere runs the next one as if nothing had been."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.training.models import fsdp_state
from skyrl_tinker.training.models.full_parameter import FullModel
from skyrl_tinker.training.models.trainable_model import Part
from skyrl_tinker.training.worker import Worker
from tests.training.conftest import MakeWorker
from tests.training.support.passes import make_data, make_item, run_one, run_pass, step

SPECS = {1: LoraSpec(8, 1), 2: LoraSpec(0, 2)}


def _network(worker: Worker, model: int) -> Any:
    found = worker._models[ModelKey(model)]
    return found.network if isinstance(found, FullModel) else worker._base


def _fail(*_: Any) -> None:
    raise torch.OutOfMemoryError("made up")


def _in_forward(layer: nn.Module, args: Any, output: Any) -> None:
    _fail()


def _in_backward(layer: nn.Module, args: Any, output: Any) -> None:
    (output if isinstance(output, torch.Tensor) else output[0]).register_hook(_fail)


@pytest.mark.parametrize("of_torch", [True, False], ids=["torch's reset", "ours"])
@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("where", [_in_forward, _in_backward])
def test_the_pass_after_an_aborted_one_has_the_same_bits(
    make_worker: MakeWorker,
    untied_model: str,
    monkeypatch: pytest.MonkeyPatch,
    where: Callable[..., None],
    model: int,
    of_torch: bool,
) -> None:
    if not of_torch:
        monkeypatch.delattr(FSDPModule, "reset_iter_state")
    found = []
    for disturbed in (True, False):
        worker = make_worker(untied_model)
        worker.create_model(ModelKey(model), SPECS[model])
        run_one(worker, make_item(model, make_data((40,), 1)))
        if disturbed:
            hook = _network(worker, model).layers[0].register_forward_hook(where)
            (refused,) = run_pass(worker, make_item(model, make_data((30, 20), 2)))
            assert "did not fit" in refused.message
            hook.remove()
        output = run_one(worker, make_item(model, make_data((30, 20), 3)))
        metrics = step(worker, model).metrics
        found.append((output.logprobs, metrics, worker._models[ModelKey(model)]))
    (logprobs, metrics, trained), (expected, expected_metrics, other) = found
    for one, two in zip(logprobs, expected, strict=True):
        np.testing.assert_array_equal(one, two)
    assert metrics == expected_metrics
    for name in other.shapes():
        assert torch.equal(trained.read(Part.WEIGHT, name), other.read(Part.WEIGHT, name))


class Stream:
    """A stream of CUDA, of which it is noted when the host waited for it."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    def synchronize(self) -> None:
        self._events.append(self._name)


@pytest.mark.parametrize("of_torch", [True, False], ids=["torch's reset", "ours"])
def test_on_cuda_the_host_waits_for_collectives_before_their_memory_is_freed(
    make_worker: MakeWorker, untied_model: str, monkeypatch: pytest.MonkeyPatch, of_torch: bool
) -> None:
    if not of_torch:
        monkeypatch.delattr(FSDPModule, "reset_iter_state")
    worker = make_worker(untied_model)
    worker.create_model(ModelKey(2), SPECS[2])
    run_one(worker, make_item(2, make_data((40,), 1)))
    root, events = _network(worker, 2), list[str]()
    state = root._get_fsdp_state()
    monkeypatch.setattr(state, "_device", torch.device("cuda"))
    for name in ("all_gather_stream", "reduce_scatter_stream"):
        monkeypatch.setattr(state._comm_ctx, name, Stream(name, events))
    group = state._fsdp_param_group
    monkeypatch.setattr(group, "_to_sharded", lambda: events.append("freed"))
    fsdp_state.reset(root)
    assert events[:3] == ["all_gather_stream", "reduce_scatter_stream", "freed"]
