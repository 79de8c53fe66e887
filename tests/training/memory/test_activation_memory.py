"""Layers of rows that would not fit are run with checkpoints, as few as will do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory import allocator
from skyrl_tinker.training.memory.activation_memory import ActivationMemory, gathered_bytes
from skyrl_tinker.training.memory.row_profile import even_batch, measure_row, whole_row
from skyrl_tinker.training.models import attention
from skyrl_tinker.training.models.planned_device import planning
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.support.tiny_models import write_tiny
from tests.training.support.passes import assert_equal, gradients_of, make_data, make_item, run_one, run_pass

LONG, SHORT = 400, 20
LAYERS = 4
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
    expected = estimate.others + sum(estimate.layers)
    assert kept / (LONG - SHORT) == pytest.approx(expected, rel=0.2)  # full: inputs of norms, too


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
    for_adapters = kept / (LONG - SHORT) - estimate.others - sum(estimate.layers)
    assert for_adapters / (256 - 8) == pytest.approx(estimate.per_rank, rel=0.2)
    assert estimate.row(LONG, 256).kept > estimate.row(LONG, 8).kept


def test_on_a_gpu_a_longer_chunk_of_logits_counts(ranks: Ranks, untied_model: str) -> None:
    estimate = ActivationMemory.measure(_worker(ranks, untied_model)._base, None, ranks)
    on_cpu = estimate.row(4096).kept
    with planning("cuda"):
        assert estimate.row(4096).kept - on_cpu == 3 * 4 * (2048 - 256) * estimate.vocab


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
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As few layers run again as will do, all of them if the row does not fit even so."""
    write_tiny(tmp_path, layers=LAYERS)
    row = ActivationMemory.measure(_worker(ranks, str(tmp_path))._base, None, ranks).row(LONG, 4)
    rooms = {again: row.needed(again) for again in range(LAYERS)} | {LAYERS: row.recomputed - 1}
    found = {}
    for again, room in rooms.items():
        monkeypatch.setattr(allocator, "free_bytes", lambda _, room=room: room / 0.8 + 1)
        worker = _worker(ranks, str(tmp_path))
        worker.create_model(ModelKey(1), LoraSpec(4, 1))
        assert worker._runner.recomputed(LONG, 4) == again
        assert worker._runner.recomputed(SHORT, 4) == 0
        found[again] = _bytes_held(worker, 1, LONG), gradients_of(worker, 1)
    kept = [held for held, _ in found.values()]
    assert kept == sorted(set(kept), reverse=True)
    for choice, again in ((True, LAYERS), (False, 0)):
        worker = _worker(ranks, str(tmp_path), choice)
        worker.create_model(ModelKey(1), LoraSpec(4, 1))
        assert _bytes_held(worker, 1, LONG) == kept[again]
    _, expected = found[0]
    for _, gradients in found.values():
        assert_equal(gradients, expected)


def test_a_pass_for_which_there_was_no_memory_keeps_least_when_it_is_repeated(
    ranks: Ranks, untied_model: str
) -> None:
    """Also the row of a sequence that no smaller budget divides."""
    kept = {}
    for choice in (None, True, False):
        worker = _worker(ranks, untied_model, choice)
        worker.create_model(ModelKey(1), LoraSpec(4, 1))
        batch = build_batch([make_item(1, make_data((LONG,), 1))])
        kept[choice] = [_held_in(partial(worker.run_pass, batch, tokens)) for tokens in (512, 256)]
    (always, _), (never, again) = kept[True], kept[False]
    assert kept[None] == [never, always]
    assert again == never


@pytest.mark.parametrize("wide", [None, 0, LAYERS - 1])
def test_the_estimate_bounds_the_peak_however_many_layers_run_again(
    ranks: Ranks, tmp_path: Path, wide: int | None
) -> None:
    """Also of a model one of whose layers keeps more than the others."""
    write_tiny(tmp_path, layers=LAYERS, tied=False)
    config = AutoConfig.from_pretrained(tmp_path)
    attention.register("cpu", torch.float32, config)
    causal_lm = AutoModelForCausalLM.from_config(config, attn_implementation=attention.IMPLEMENTATION)
    if wide is not None:
        layer = causal_lm.model.layers[wide]
        config.intermediate_size *= 8
        layer.mlp = type(layer.mlp)(config)
    worker = Worker(TrainerSpec(str(tmp_path), 1, "cpu", "float32", 1, LONG), 0)
    worker.attach(ranks, causal_lm)
    worker.create_model(ModelKey(1), LoraSpec(8, 1))
    row = ActivationMemory.measure(worker._base, None, ranks).row(LONG)
    batch = even_batch([ModelKey(1)], LONG, 512)
    saved = []
    for again in range(LAYERS + 1):
        found = measure_row(worker._base, worker._models, batch, whole_row(batch), ranks, recompute=again)
        assert found.peak <= row.needed(again)
        saved.append(found.saved)
    taken = [(saved[0] - left) / again for again, left in enumerate(saved) if again]
    assert min(taken) == pytest.approx(row.layer, rel=0.1)
    assert max(taken) < 1.1 * min(taken) if wide is None else max(taken) > 1.3 * min(taken)
