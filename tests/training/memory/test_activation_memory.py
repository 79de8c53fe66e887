"""Rows that would not fit are run with checkpoints; the others are not."""

from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.system.host_memory import HostMemory
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory import allocator
from skyrl_tinker.training.memory.activation_memory import ActivationMemory, gathered_bytes
from skyrl_tinker.training.models.planned_device import planning
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.training.support.passes import gradients_of, make_data, make_item, run_one, run_pass

LONG, SHORT = 400, 20
FULL = LoraSpec(0, 0)


def _worker(ranks: Ranks, directory: str, choice: bool | None = None, dtype: str = "float32") -> Worker:
    worker = Worker(TrainerSpec(directory, 1, "cpu", dtype, 1, 512, gradient_checkpointing=choice), 0)
    worker.attach(ranks)
    return worker


def _bytes_held(worker: Worker, model: int, tokens: int) -> int:
    return _held_in(lambda: run_one(worker, make_item(model, make_data((tokens,), 1))))


def _held_in(run: Callable[[], object]) -> int:
    """Run a row; count the bytes of all storages that autograd keeps in it, outside of checkpoints."""
    held: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage._cdata] = storage.nbytes(), storage  # alive, so that no other gets its address
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(size for size, _ in held.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [LoraSpec(4, 1), FULL], ids=["lora", "full"])
def test_the_estimate_is_what_a_long_row_keeps(
    ranks: Ranks, model_directory: str, dtype: str, spec: LoraSpec
) -> None:
    worker = _worker(ranks, model_directory, False, dtype)
    worker.create_model(ModelKey(1), spec)
    kept = _bytes_held(worker, 1, LONG) - _bytes_held(worker, 1, SHORT)
    estimate = ActivationMemory.measure(worker._base, None, ranks)
    assert kept / (LONG - SHORT) == pytest.approx(estimate.kept, rel=0.2)  # full: inputs of norms, too


def test_the_estimate_counts_the_ranks_of_all_tenants_of_a_row(ranks: Ranks, untied_model: str) -> None:
    """As a GPU computes them: side by side."""
    worker = _worker(ranks, untied_model, False)
    estimate = ActivationMemory.measure(worker._base, None, ranks)
    for model in (1, 2):
        worker.create_model(ModelKey(model), LoraSpec(128, model))

    def held(tokens: int) -> int:
        items = [make_item(model, make_data((tokens // 2,), 1)) for model in (1, 2)]
        return _held_in(lambda: run_pass(worker, *items))

    with planning("cuda"):
        kept = held(LONG) - held(SHORT)
    for_adapters = kept / (LONG - SHORT) - estimate.kept
    assert for_adapters / (256 - 8) == pytest.approx(estimate.per_rank, rel=0.2)
    assert estimate.row_bytes(LONG, 256) > estimate.row_bytes(LONG, 8)


def test_on_a_gpu_a_longer_chunk_of_logits_counts(ranks: Ranks, untied_model: str) -> None:
    estimate = ActivationMemory.measure(_worker(ranks, untied_model)._base, None, ranks)
    on_cpu = estimate.row_bytes(4096)
    with planning("cuda"):
        assert estimate.row_bytes(4096) - on_cpu == 3 * 4 * (2048 - 256) * estimate.vocab


def test_two_layers_and_the_rest_are_gathered_at_one_time(ranks: Ranks, untied_model: str) -> None:
    """Of a model that has two layers."""
    base = _worker(ranks, untied_model)._base
    assert gathered_bytes(base) == sum(4 * parameter.numel() for parameter in base.parameters())


def test_measuring_leaves_no_gradients(ranks: Ranks, model_directory: str) -> None:
    worker = _worker(ranks, model_directory)
    worker.create_model(ModelKey(1), LoraSpec(4, 1))
    ActivationMemory.measure(worker._base, None, ranks)
    assert not any(gradient.any() for gradient in gradients_of(worker, 1).values())
    assert all(parameter.grad is None for parameter in worker._base.parameters())


def test_a_row_that_would_not_fit_keeps_less_and_has_the_same_gradients(
    ranks: Ranks, untied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = ActivationMemory.measure(_worker(ranks, untied_model)._base, None, ranks)
    free = (estimate.row_bytes(SHORT) + estimate.row_bytes(LONG)) / 2
    found = []
    for choice, available in ((None, free), (None, 1e12), (True, 1e12), (False, free)):
        monkeypatch.setattr(allocator, "host_memory", lambda size=available: HostMemory(0, int(size)))
        worker = _worker(ranks, untied_model, choice)
        worker.create_model(ModelKey(1), LoraSpec(4, 1))
        kept = [_bytes_held(worker, 1, tokens) for tokens in (SHORT, LONG)]
        found.append((kept, gradients_of(worker, 1)))
    (automatic, gradients), (roomy, _), (always, _), (never, expected) = found
    assert automatic == [never[0], always[1]]
    assert roomy == never
    assert always[0] < never[0] / 2
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name])
