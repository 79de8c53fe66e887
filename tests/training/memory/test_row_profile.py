"""Fake tensors cost what real ones do: the same operations, and the same memory to the byte."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory.dispatch_counter import DispatchCounter
from skyrl_tinker.training.memory.row_profile import (
    FakeTrainer,
    RowProfile,
    Training,
    even_batch,
    measure_row,
    whole_row,
)
from skyrl_tinker.training.models.fused import liger
from skyrl_tinker.training.models.planned_device import device_type, planning
from skyrl_tinker.training.models.products import COLUMNS, wide_product
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.support.tiny_models import write_tiny

VOCAB = 512
LORA = LoraSpec(8, 1)


def _training(directory: str, **changed: Any) -> Training:
    config = json.loads((Path(directory) / "config.json").read_text())
    return Training(config, **{"device": "cpu", "dtype": "float32", "lora": LORA} | changed)


def _worker(ranks: Ranks, training: Training, directory: str) -> Worker:
    """Worker with real tensors."""
    worker = Worker(TrainerSpec(directory, 1, "cpu", training.dtype, 1, 512), 0)
    worker.attach(ranks)
    for number in range(1, training.tenants + 1):
        worker.create_model(ModelKey(number), training.lora)
    return worker


def _measure(worker: Worker, ranks: Ranks, tokens: int, recompute: int = 0) -> RowProfile:
    batch = even_batch(list(worker._models), tokens, VOCAB)
    return measure_row(worker._base, worker._models, batch, whole_row(batch), ranks, recompute=recompute)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize(("tenants", "tokens"), [(1, 96), (3, 480)])
def test_a_fake_row_costs_what_a_real_one_does(
    ranks: Ranks, untied_model: str, dtype: str, recompute: int, tenants: int, tokens: int
) -> None:
    training = _training(untied_model, dtype=dtype, tenants=tenants)
    worker, fake = _worker(ranks, training, untied_model), FakeTrainer(training, ranks)
    for _ in range(2):  # in the first row, FSDP still allocates
        expected = _measure(worker, ranks, tokens, recompute)
        found = fake.measure(tokens, recompute=recompute)
    assert found == expected
    assert min(found.operations, found.reads, found.saved, found.peak - found.saved) > 0


@pytest.mark.parametrize(
    "with_liger",
    [pytest.param(True, id="liger-kernel"), pytest.param(False, id="torch", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize("arch", ["qwen3", "gemma3"])
def test_a_fake_row_for_cuda_costs_what_a_real_one_does_that_takes_its_way(
    ranks: Ranks, tmp_path: Path, arch: str, recompute: int, with_liger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 attention is the same on both, by segments; all else runs as on CUDA."""
    monkeypatch.setattr(liger, "installed", lambda: with_liger)
    write_tiny(tmp_path, arch=arch)
    training = _training(str(tmp_path), device="cuda", tenants=2)
    worker, fake = _worker(ranks, training, str(tmp_path)), FakeTrainer(training, ranks)
    with planning("cuda"):
        expected = _measure(worker, ranks, 256, recompute)
    found = fake.measure(256, recompute=recompute)
    views = 0 if with_liger else 2  # gradients of SDPA are laid out otherwise than those of fake tensors
    assert found == replace(expected, operations=expected.operations - views)
    eager = FakeTrainer(replace(training, device="cpu"), ranks).measure(256, recompute=recompute)
    assert expected.operations < eager.operations
    assert expected.saved < eager.saved or recompute


def test_memory_counts_what_autograd_saves(ranks: Ranks, untied_model: str) -> None:
    """Counted another way: by the hooks through which autograd saves tensors."""
    tokens = 384
    worker = _worker(ranks, _training(untied_model), untied_model)
    batch = even_batch([ModelKey(1)], tokens, VOCAB)
    row = whole_row(batch)
    before = [*worker._models[ModelKey(1)].tensors(), row.tokens, row.positions, row.targets]
    before += [row.segments.cu_seqlens, *row.inputs.values(), *worker._base.parameters()]
    with _saved_storages() as saved:
        profile = measure_row(worker._base, worker._models, batch, row, ranks, recompute=0)
    own = {*saved} - {tensor.untyped_storage()._cdata for tensor in before}
    logits, logprobs, clone = tokens * VOCAB * 4, tokens * 4, profile.state // 4
    assert profile.saved - clone - logits - logprobs == pytest.approx(
        sum(saved[key] for key in own), rel=0.005
    )


@contextmanager
def _saved_storages() -> Iterator[dict[int, int]]:
    """Sizes of what was saved, as they are when the first of it is used: FSDP has freed whole weights."""
    storages: dict[int, torch.UntypedStorage] = {}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        if not sizes:
            sizes.update({key: storage.nbytes() for key, storage in storages.items()})
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield sizes


def test_layers_add_the_same_each(ranks: Ranks, untied_model: str) -> None:
    training = _training(untied_model)
    trainers = {layers: FakeTrainer(training.with_layers(layers), ranks) for layers in (2, 3, 7)}
    for recompute in (False, True):
        two, three, seven = (
            trainer.measure(256, recompute=recompute * layers) for layers, trainer in trainers.items()
        )
        for name in ("weights", "state", "saved", "peak"):
            a, b, c = (getattr(profile, name) for profile in (two, three, seven))
            assert c - a == 5 * (b - a), (name, recompute)


def test_a_tensor_counts_until_nothing_refers_to_it_at_the_size_it_has() -> None:
    with DispatchCounter() as counter:
        first = torch.zeros(256)
        view = first[:10]
        second = torch.ones(512)
        assert counter.live == counter.peak == 1024 + 2048
        del first, second
        assert (counter.live, counter.peak) == (1024, 3072)
        view.untyped_storage().resize_(0)
        assert counter.live == 0
        assert bool(torch.tensor([2.0]).sum() > 1)
    assert (counter.reads, counter.peak) == (1, 3072)


def test_the_kernel_of_cuda_keeps_what_flash_attention_does(ranks: Ranks, untied_model: str) -> None:
    """Keys and values are kept for their own heads, and no scores: [H, T, T] would show."""
    training = _training(untied_model, device="cuda", dtype="bfloat16").with_layers(1)
    short, middle, long = (FakeTrainer(training, ranks).measure(tokens) for tokens in (256, 512, 1024))
    assert long.saved - middle.saved == 2 * (middle.saved - short.saved)


def test_fake_rows_for_cuda_take_its_way_through_the_head() -> None:
    """A CPU multiplies bfloat16 into float32 by columns; CUDA does in one call."""
    operations = {}
    with FakeTensorMode():
        left, right = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((4, 8), (8, 3 * COLUMNS)))
        for device in ("cuda", "cpu"):
            with planning(device), DispatchCounter() as counter:
                assert wide_product(left, right).dtype == torch.float32
            operations[device] = counter.operations
    assert operations["cuda"] == 2  # allocate, multiply
    assert operations["cpu"] > 9
    assert device_type(left) == "cpu"
