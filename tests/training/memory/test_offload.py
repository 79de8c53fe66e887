"""State set aside leaves the device empty and comes back to the last bit."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, LoraSpec, PassItem, PassOutput, StepItem
from skyrl_tinker.errors import TrainerError
from skyrl_tinker.training.models.network import network_tensors
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.training.conftest import MakeWorker
from tests.training.support.passes import assert_equal, make_data, make_item, run_pass, step, weights_of
from tests.training.support.saves import published_weights, save, write_weights

A, B, FULL = (ModelKey(number) for number in (1, 2, 3))
SPECS = {A: LoraSpec(4, 1, train_unembed=True), B: LoraSpec(16, 2, train_mlp=False), FULL: LoraSpec(0, 3)}


def _item(model: ModelKey, seed: int, *, backward: bool = True) -> PassItem:
    return make_item(model, make_data((40, 10, 25), seed), backward=backward)


def _with_models(worker: Worker) -> Worker:
    for model, spec in SPECS.items():
        worker.create_model(model, spec)
    return worker


def _storages(worker: Worker) -> list[torch.UntypedStorage]:
    """Storages of everything that a rank holds, found through modules and models."""
    tensors = list(network_tensors(worker._base))
    for model in worker._models.values():
        tensors += model.tensors()
        tensors += [leaf for pair in getattr(model, "pairs", {}).values() for leaf in (*pair, pair[0].grad)]
    return [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]


def _train(worker: Worker, *, aside: bool) -> list[PassOutput]:
    """Two steps of three tenants, the second over two passes; `aside`: between any two calls."""
    outputs = []

    def rest() -> None:
        if aside:
            worker.offload()
            assert all(storage.nbytes() == 0 for storage in _storages(worker))
            worker.onload()

    for seed in range(3):
        rest()
        outputs += run_pass(worker, *(_item(model, seed) for model in SPECS))
        if seed != 1:
            for model in SPECS:
                rest()  # gradients wait for their step
                step(worker, model)
    rest()
    return outputs + run_pass(worker, *(_item(model, 9, backward=False) for model in SPECS))


def test_what_was_captured_and_saved_can_still_be_moved(worker: Worker, tmp_path: Path) -> None:
    _with_models(worker)
    for model in (A, FULL):
        write_weights(worker, model, tmp_path / f"weights {model}")
        save(worker, model, tmp_path / str(model))
        worker.load_state(model, str(tmp_path / str(model)), True)
    worker.offload()
    assert all(storage.nbytes() == 0 for storage in _storages(worker))
    worker.onload()


def _assert_same(outputs: list[PassOutput], expected: list[PassOutput]) -> None:
    for one, other in zip(outputs, expected, strict=True):
        assert one.metrics == other.metrics
        for found, wanted in zip(one.logprobs, other.logprobs, strict=True):
            assert (found == wanted).all()


def test_training_with_the_state_set_aside_between_calls_is_the_same_to_the_last_bit(
    make_worker: MakeWorker, model_directory: str
) -> None:
    moved, kept = (_with_models(make_worker(model_directory)) for _ in range(2))
    _assert_same(_train(moved, aside=True), _train(kept, aside=False))
    for model in (A, B):
        assert_equal(weights_of(moved, model), weights_of(kept, model))


def test_moving_twice_is_moving_once(worker: Worker) -> None:
    _with_models(worker)
    (before,) = run_pass(worker, _item(A, 1, backward=False))
    for _ in range(2):
        worker.offload()
    for _ in range(2):
        worker.onload()
    (after,) = run_pass(worker, _item(A, 1, backward=False))
    _assert_same([after], [before])


def test_what_did_not_change_is_not_copied_again(worker: Worker) -> None:
    _with_models(worker)
    worker.offload()
    asides = {None: worker._base_buffer, **worker._device_cache._buffers}
    copies = {key: aside._copies for key, aside in asides.items()}
    worker.onload()
    run_pass(worker, _item(A, 1), _item(B, 1, backward=False))
    worker.offload()
    again = {key for key, aside in asides.items() if aside._copies is not copies[key]}
    assert again == {A}
    worker.onload()


def test_a_model_is_released_while_its_state_is_aside(worker: Worker) -> None:
    _with_models(worker)
    worker.offload()
    for model in (A, FULL):
        worker.release(model)
    worker.onload()
    (output,) = run_pass(worker, _item(B, 1))
    assert isinstance(output, PassOutput)


def test_nothing_is_computed_while_the_state_is_aside(worker: Worker) -> None:
    _with_models(worker)
    worker.offload()
    for attempt in (
        lambda: run_pass(worker, _item(A, 1)),
        lambda: step(worker, A),
        lambda: worker.create_model(ModelKey(9), SPECS[A]),
        lambda: worker.capture_weights({A: 0}, {A: False}),
    ):
        with pytest.raises(TrainerError, match="offloaded"):
            attempt()
    worker.onload()


async def _train_group(group: TrainerGroup, *, aside: bool) -> list[PassOutput]:
    async def rest() -> None:
        if aside:
            await group.offload()
            await group.onload()

    outputs: list[PassOutput] = []
    for model, spec in SPECS.items():
        await group.create_model(model, spec)
    for seed in range(2):
        await rest()
        outputs += await _pass(group, seed, backward=True)
        await rest()
        await group.optim_step([StepItem(RequestId("s"), model, AdamParams(1e-2)) for model in SPECS])
    await rest()
    return outputs + await _pass(group, 9, backward=False)


async def _pass(group: TrainerGroup, seed: int, *, backward: bool) -> list[PassOutput]:
    prepared = group.prepare([_item(model, seed, backward=backward) for model in SPECS])
    outputs = (await group.run_pass(prepared)).outputs
    return [output for output in outputs if isinstance(output, PassOutput)]


@pytest.mark.long
async def test_two_ranks_train_the_same_with_their_shards_set_aside(
    ray_cluster: None, tied_model: str
) -> None:
    group = TrainerGroup.launch(TrainerSpec(tied_model, 2, "cpu", "float32", 1, 64))
    await group.ready()
    moved = await _train_group(group, aside=True)
    weights = await published_weights(group, A)
    for model in SPECS:
        await group.release(model)
    _assert_same(moved, await _train_group(group, aside=False))
    for name, array in (await published_weights(group, A)).items():
        assert (weights[name] == array).all()
    await group.shutdown()
