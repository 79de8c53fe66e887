"""Hundreds of tenants on a device that holds a few: offloaded ones cost it nothing, and all train alike."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import UntypedStorage

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import (
    AdamParams,
    DimuonParams,
    LoraSpec,
    OptimizerFamily,
    PassOutput,
    StepItem,
    StepOutput,
)
from skyrl_tinker.errors import ExhaustedError
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory.offload import storages
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.training.support.passes import assert_equal, make_data, make_item, run_pass, weights_of
from tests.training.support.saves import save

LIMIT = 4
TENANTS = range(300)
FULL = ModelKey(1000)
PARAMS = {"adamw": AdamParams(1e-2), "dimuon": DimuonParams(1e-2)}


def _family(tenant: int) -> OptimizerFamily:
    return "dimuon" if tenant % 3 == 0 else "adamw"


def _spec(tenant: int) -> LoraSpec:
    return LoraSpec((2, 4, 8)[tenant % 3], tenant, train_mlp=tenant % 2 == 0)


def _worker(directory: str, ranks: Ranks, limit: int, tenants: Iterable[int] = TENANTS) -> Worker:
    worker = Worker(TrainerSpec(directory, 1, "cpu", "float32", 1, 128, resident_models=limit), 0)
    worker.attach(ranks)
    for tenant in tenants:
        worker.create_model(ModelKey(tenant), _spec(tenant), _family(tenant))
    return worker


def _step(worker: Worker, tenants: Iterable[int]) -> list[StepOutput]:
    items = [StepItem(RequestId("s"), ModelKey(each), PARAMS[_family(each)]) for each in tenants]
    return worker.optim_step(items)


def _storages(worker: Worker, tenant: int) -> list[UntypedStorage]:
    return storages(worker._models[ModelKey(tenant)].tensors())


def _away(worker: Worker) -> set[int]:
    """Tenants without any memory on the device."""
    return {key for key in worker._models if all(each.nbytes() == 0 for each in _storages(worker, key))}


@contextmanager
def _nothing_comes_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is no memory for what is not on the device."""
    resize = UntypedStorage.resize_

    def short(storage: UntypedStorage, size: int) -> object:
        if size:
            raise MemoryError
        return resize(storage, size)

    with monkeypatch.context() as patched:
        patched.setattr(UntypedStorage, "resize_", short)
        yield


def _assert_same(found: list[object], expected: list[object]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, PassOutput | StepOutput)
        assert isinstance(other, PassOutput | StepOutput)
        assert one.metrics == other.metrics
        if isinstance(one, PassOutput) and isinstance(other, PassOutput):
            assert all((a == b).all() for a, b in zip(one.logprobs, other.logprobs, strict=True))


def _act(worker: Worker, choice: random.Random) -> list[object]:
    """Do something that a server may ask for, for a few of a few tenants, so that they recur."""
    tenants = choice.sample(range(0, 300, 23), choice.randint(1, 6))
    seed = choice.randrange(100)
    match choice.choice(["pass", "pass", "pass", "step", "step", "clear", "move"]):
        case "pass":
            backward = [choice.random() < 0.8 for _ in tenants]
            items = [
                make_item(each, make_data((5, 9), seed + each), backward=flag)
                for each, flag in zip(tenants, backward, strict=True)
            ]
            return list(run_pass(worker, *items))
        case "step":
            return list(_step(worker, tenants))
        case "clear":
            worker.zero_gradients([ModelKey(each) for each in tenants])
        case "move":
            worker.offload()
            worker.onload()
    return []


def test_three_hundred_tenants_on_four_places_train_to_the_last_bit_as_with_room_for_all(
    untied_model: str, ranks: Ranks
) -> None:
    few, all_ = (_worker(untied_model, ranks, limit) for limit in (LIMIT, 0))
    assert len(_away(few)) == len(TENANTS) - LIMIT
    assert not _away(all_)
    choices = random.Random(7), random.Random(7)
    for _ in range(80):
        _assert_same(*(_act(worker, choice) for worker, choice in zip((few, all_), choices, strict=True)))
    for tenant in TENANTS:
        assert_equal(weights_of(few, tenant), weights_of(all_, tenant))
    assert len(_away(few)) == len(TENANTS) - LIMIT


def test_the_longest_unused_goes_first(untied_model: str, ranks: Ranks) -> None:
    worker = _worker(untied_model, ranks, 3, range(5))
    assert _away(worker) == {0, 1}
    run_pass(worker, make_item(2, make_data((5,), 1)))
    run_pass(worker, make_item(0, make_data((5,), 1), backward=False))
    assert _away(worker) == {1, 3}
    worker.release(ModelKey(4))
    weights_of(worker, 3)
    assert _away(worker) == {1}


def test_a_pass_over_more_models_than_places_has_them_all(untied_model: str, ranks: Ranks) -> None:
    worker = _worker(untied_model, ranks, 2, range(6))
    outputs = run_pass(worker, *(make_item(each, make_data((5,), each)) for each in range(5)))
    assert all(isinstance(output, PassOutput) for output in outputs)
    assert _away(worker) == {5}
    _step(worker, range(5))  # one after the other
    assert len(_away(worker)) == 4


def test_who_never_trained_costs_the_host_weights_only(untied_model: str, ranks: Ranks) -> None:
    worker = _worker(untied_model, ranks, 1, range(2))
    weights = sum(tensor.nbytes for tensor in weights_of(worker, 0).values())
    worker.offload()
    for key in (0, 1):
        copies = worker._device_cache._buffers[ModelKey(key)]._copies
        hosts = [copy.host for copy in copies if copy.host is not None]
        if key == 0:
            assert sum(host.nbytes for host in hosts) == weights
        assert len(copies) == 2  # weights and gradients, which are zero
        assert len(hosts) == 1
    worker.onload()
    assert _away(worker) == {1}


def test_who_only_reads_is_not_copied_again(untied_model: str, ranks: Ranks) -> None:
    worker = _worker(untied_model, ranks, 1, range(2))
    aside = worker._device_cache._buffers[ModelKey(0)]
    copies = aside._copies
    run_pass(worker, make_item(0, make_data((5,), 1), backward=False))
    run_pass(worker, make_item(1, make_data((5,), 1)))
    assert aside._copies is copies
    run_pass(worker, make_item(0, make_data((5,), 1)))
    run_pass(worker, make_item(1, make_data((5,), 1)))
    assert aside._copies is not copies


@pytest.mark.parametrize("family", ["adamw", "dimuon"])
def test_who_is_away_can_be_saved_loaded_and_released(
    untied_model: str, ranks: Ranks, tmp_path: Path, family: OptimizerFamily
) -> None:
    worker = _worker(untied_model, ranks, 1, ())
    for key in range(3):
        worker.create_model(ModelKey(key), LoraSpec(4, key), family)
    run_pass(worker, make_item(0, make_data((5,), 1)))
    worker.optim_step([StepItem(RequestId("s"), ModelKey(0), PARAMS[family])])
    before = weights_of(worker, 0)
    run_pass(worker, make_item(1, make_data((5,), 1)))
    assert 0 in _away(worker)
    save(worker, 0, tmp_path / "c")
    worker.load_state(ModelKey(2), str(tmp_path / "c"), True)
    assert_equal(weights_of(worker, 2), before)
    worker.release(ModelKey(1))
    assert _away(worker) == {0}


def test_full_parameter_models_stay(untied_model: str, ranks: Ranks) -> None:
    worker = _worker(untied_model, ranks, 1, range(2))
    worker.create_model(FULL, LoraSpec(0, 0))
    outputs = run_pass(worker, *(make_item(key, make_data((5,), 1)) for key in (0, 1, FULL)))
    assert all(isinstance(output, PassOutput) for output in outputs)
    weights_of(worker, 0)
    assert _away(worker) == {1}


def test_gradients_are_cleared_where_they_are(ranks: Ranks, untied_model: str) -> None:
    worker = _worker(untied_model, ranks, 1, range(2))
    for tenant in range(2):
        run_pass(worker, make_item(tenant, make_data((9,), tenant)))
    before = weights_of(worker, 0)
    run_pass(worker, make_item(1, make_data((9,), 1)))
    worker.zero_gradients([ModelKey(0)])
    assert _away(worker) == {0}
    worker.zero_gradients([ModelKey(1)])
    outputs = _step(worker, range(2))
    assert [output.metrics.get("no_gradients") for output in outputs] == [1.0, 1.0]
    run_pass(worker, make_item(0, make_data((9,), 0)))
    assert_equal(weights_of(worker, 0), before)


def test_gradients_are_cleared_though_there_was_no_memory_to_restore_them(
    ranks: Ranks, untied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = _worker(untied_model, ranks, 2, range(2))
    worker.create_model(FULL, LoraSpec(0, 3))
    for model in (0, 1, FULL):
        run_pass(worker, make_item(model, make_data((9,), model)))
    worker.offload()
    with _nothing_comes_back(monkeypatch):
        with pytest.raises(ExhaustedError):
            worker.onload()
        worker.zero_gradients([ModelKey(0), FULL])
    worker.onload()
    outputs = _step(worker, (0, 1, FULL))
    assert ["no_gradients" in output.metrics for output in outputs] == [True, False, True]


@pytest.mark.parametrize("all_offloaded", [True, False], ids=["as the device is taken back", "one adapter"])
def test_a_pass_without_memory_for_its_models_is_told_so_and_not_to_be_shorter(
    ranks: Ranks, untied_model: str, monkeypatch: pytest.MonkeyPatch, all_offloaded: bool
) -> None:
    worker, batch = _worker(untied_model, ranks, 1, range(2)), build_batch([make_item(0, make_data((9,), 0))])
    if all_offloaded:
        worker.offload()
    with _nothing_comes_back(monkeypatch):
        if all_offloaded:
            with pytest.raises(ExhaustedError):
                worker.onload()
        output = worker.run_pass(batch)
    assert output.exhausted
    message = output.failures[0].message
    assert message.startswith("a trainer rank ran out of memory (MemoryError()) as it brought models back")
    assert "shorter" not in message
    assert not worker.run_pass(batch).failures
