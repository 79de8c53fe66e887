import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.manifest import read_manifest
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import ExhaustedError, StorageError, UserError
from skyrl_tinker.training.checkpoints.checkpoint_save import Captured, Layout
from skyrl_tinker.training.models.full_parameter import FullModel
from skyrl_tinker.training.worker import Worker
from tests.support.failures import files_up_to
from tests.training.conftest import MakeWorker
from tests.training.support import reference
from tests.training.support.passes import (
    assert_equal,
    make_data,
    make_item,
    perturb,
    run_one,
    step,
    weights_of,
)
from tests.training.support.saves import save

LORA, FULL = LoraSpec(8, 3), LoraSpec(0, 0)
DATA = make_data((30, 20), 50)


def _train(worker: Worker, model: int, first: int, count: int) -> None:
    for number in range(first, first + count):
        run_one(worker, make_item(model, make_data((30, 20), number)))
        step(worker, model)


def _logprobs(worker: Worker, model: int) -> list[np.ndarray]:
    return list(run_one(worker, make_item(model, DATA, backward=False)).logprobs)


@pytest.mark.parametrize("spec", [LORA, FULL])
def test_training_goes_on_from_a_checkpoint_to_the_last_bit(
    make_worker: MakeWorker, model_directory: str, tmp_path: Path, spec: LoraSpec
) -> None:
    worker = make_worker(model_directory)
    worker.create_model(ModelKey(1), spec)
    _train(worker, 1, 0, 2)
    saved = tmp_path / "run" / "c"
    size = save(worker, 1, saved)
    assert size == sum(file.stat().st_size for file in saved.iterdir())
    before = _logprobs(worker, 1)
    _train(worker, 1, 2, 2)
    after = _logprobs(worker, 1)
    other = make_worker(model_directory)
    other.create_model(ModelKey(9), read_manifest(saved).spec)
    run_one(other, make_item(9, DATA))  # gradients that the load must clear
    other.load_state(ModelKey(9), str(saved), True)
    np.testing.assert_equal(_logprobs(other, 9), before)
    assert step(other, 9).metrics == {
        "grad_norm": 0.0,
        "learning_rate": 1e-2,
        "optimizer_step": 2.0,
        "no_gradients": 1.0,
    }
    _train(other, 9, 2, 2)
    np.testing.assert_equal(_logprobs(other, 9), after)


@pytest.mark.parametrize("spec", [LORA, FULL])
def test_a_checkpoint_holds_the_state_at_its_capture_whatever_comes_after(
    worker: Worker, tmp_path: Path, spec: LoraSpec
) -> None:
    worker.create_model(ModelKey(1), spec)
    _train(worker, 1, 0, 1)
    save(worker, 1, tmp_path / "now")
    worker.capture_state(ModelKey(1), 7, True)
    _train(worker, 1, 1, 2)
    worker.release(ModelKey(1))
    files = worker.persist_state(7, str(tmp_path / "scratch"))
    worker.commit_state(7, files, str(tmp_path / "scratch"), str(tmp_path / "late"))
    assert read_manifest(tmp_path / "late") == read_manifest(tmp_path / "now")  # checksums and all
    assert worker.persist_state(7, str(tmp_path / "scratch")) == files, "as when the first disk was full"
    worker.drop_captured(7)
    assert 7 not in worker._captured


@pytest.mark.parametrize("spec", [LORA, FULL])
def test_before_the_first_step_the_optimizer_has_no_state_to_keep(
    worker: Worker, tmp_path: Path, spec: LoraSpec
) -> None:
    worker.create_model(ModelKey(1), spec)
    save(worker, 1, tmp_path / "c")
    assert not (tmp_path / "c" / "optimizer.safetensors").exists()
    data = make_item(1, DATA)
    run_one(worker, data)
    step(worker, 1)
    after = _logprobs(worker, 1)
    worker.load_state(ModelKey(1), str(tmp_path / "c"), True)
    run_one(worker, data)
    assert step(worker, 1).metrics["optimizer_step"] == 1.0
    np.testing.assert_equal(_logprobs(worker, 1), after)


def test_the_state_of_another_optimizer_is_refused_by_both_names(worker: Worker, tmp_path: Path) -> None:
    worker.create_model(ModelKey(1), LORA, "adamw")
    worker.create_model(ModelKey(2), LORA, "dimuon")
    _train(worker, 1, 0, 1)
    save(worker, 1, tmp_path / "c")
    weights = weights_of(worker, 2)
    with pytest.raises(UserError, match="optimizer adamw, this model has dimuon"):
        worker.load_state(ModelKey(2), str(tmp_path / "c"), True)
    assert_equal(weights_of(worker, 2), weights)
    worker.load_state(ModelKey(2), str(tmp_path / "c"), False)
    assert_equal(weights_of(worker, 2), weights_of(worker, 1))


def test_load_without_optimizer_starts_its_state_anew(worker: Worker, tmp_path: Path) -> None:
    worker.create_model(ModelKey(1), LORA)
    _train(worker, 1, 0, 2)
    save(worker, 1, tmp_path / "c", optimizer=False)
    weights = weights_of(worker, 1)
    worker.load_state(ModelKey(1), str(tmp_path / "c"), False)
    assert_equal(weights_of(worker, 1), weights)
    assert step(worker, 1).metrics["optimizer_step"] == 0.0
    with pytest.raises(UserError, match="without optimizer state"):
        worker.load_state(ModelKey(1), str(tmp_path / "c"), True)


# PEFT warns of what is meant here: the adapter adapts the head and leaves the tied embedding alone.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_peft_loads_the_adapter_and_gives_the_same_logprobs(
    make_worker: MakeWorker, model_directory: str, tmp_path: Path
) -> None:
    worker = make_worker(model_directory)
    worker.create_model(ModelKey(1), LORA)
    perturb(worker, 1)
    save(worker, 1, tmp_path / "c")
    peft = PeftModel.from_pretrained(reference.load(model_directory), str(tmp_path / "c"))
    for datum, found in zip(DATA, _logprobs(worker, 1), strict=True):
        logits = peft(torch.tensor(datum.tokens, dtype=torch.int64)[None]).logits[0]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(datum.target_tokens)[:, None])[:, 0]
        np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("room", "count"), [(0, 1), (1, 1), (2, 2), (9, 3)])
def test_as_many_models_are_captured_at_once_as_have_room(worker: Worker, room: int, count: int) -> None:
    """In any case the first one."""
    for model in (1, 2, 3):
        worker.create_model(ModelKey(model), LORA)
    size = 4 * 3 * sum(tensor.numel() for tensor in weights_of(worker, 1).values())
    numbers = {ModelKey(model): 10 * model for model in (1, 2, 3)}
    assert list(worker.capture_states(numbers, room * size)) == list(numbers)[:count]
    assert list(worker._captured) == [10, 20, 30][:count]


def test_memory_that_runs_out_for_the_second_model_costs_the_first_nothing(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in (1, 2):
        worker.create_model(ModelKey(model), LORA)
    copy, copied = worker._copy, list[ModelKey]()

    def short_of_memory(key: ModelKey, optimizer: bool, layout: Layout) -> Captured:
        copied.append(key)
        if len(copied) > 1:
            raise ExhaustedError("no memory")
        return copy(key, optimizer, layout)

    monkeypatch.setattr(worker, "_copy", short_of_memory)
    assert list(worker.capture_states({ModelKey(1): 0, ModelKey(2): 1}, 1 << 30)) == [ModelKey(1)]
    with pytest.raises(ExhaustedError):
        worker.capture_states({ModelKey(2): 2}, 1 << 30)
    assert list(worker._captured) == [0]


def test_an_existing_checkpoint_is_never_overwritten(worker: Worker, tmp_path: Path) -> None:
    worker.create_model(ModelKey(1), LORA)
    save(worker, 1, tmp_path / "c", optimizer=False)
    before = {file.name: file.read_bytes() for file in (tmp_path / "c").iterdir()}
    perturb(worker, 1)
    with pytest.raises(UserError, match="the directory exists"):
        save(worker, 1, tmp_path / "c", optimizer=False)
    assert {file.name: file.read_bytes() for file in (tmp_path / "c").iterdir()} == before


@pytest.mark.parametrize("spec", [LORA, FULL])
def test_a_full_disk_fails_the_save_and_makes_no_checkpoint(
    worker: Worker, tmp_path: Path, spec: LoraSpec
) -> None:
    worker.create_model(ModelKey(1), spec)
    refused = pytest.raises(StorageError, match="rank 0 could not write the checkpoint: File too large")
    with files_up_to(4096), refused:
        save(worker, 1, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    assert save(worker, 1, tmp_path / "c") > 4096


def test_damage_of_a_checkpoint_is_found_by_the_rank_whose_share_it_is(
    worker: Worker, tmp_path: Path
) -> None:
    worker.create_model(ModelKey(1), LORA)
    save(worker, 1, tmp_path / "c")
    file = tmp_path / "c" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    share = list(read_manifest(tmp_path / "c").files).index(file.name)
    for rank in range(3):
        damage = pytest.raises(UserError, match=r"is damaged: adapter_model\.safetensors")
        with damage if share % 3 == rank else nullcontext():
            worker.files.verify(str(tmp_path / "c"), rank, 3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LoraSpec(4, 3), "expected LoRA rank 4, found 8"),
        (LoraSpec(8, 3, train_mlp=False), "train_mlp: expected False, found True"),
        (LoraSpec(8, 3, train_unembed=False), "train_unembed: expected False, found True"),
        (FULL, "expected LoRA rank 0, found 8"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused(
    worker: Worker, tmp_path: Path, spec: LoraSpec, message: str
) -> None:
    worker.create_model(ModelKey(1), LORA)
    worker.create_model(ModelKey(2), spec)
    save(worker, 1, tmp_path / "c", optimizer=False)
    with pytest.raises(UserError, match=message):
        worker.load_state(ModelKey(2), str(tmp_path / "c"), False)


def test_a_directory_without_manifest_is_no_checkpoint(worker: Worker, tmp_path: Path) -> None:
    worker.create_model(ModelKey(1), LORA)
    with pytest.raises(UserError, match="no checkpoint at"):
        worker.load_state(ModelKey(1), str(tmp_path), False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 1}', "expected checkpoint format 2, found 1"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"format": 2}', "is damaged: KeyError"),
    ],
)
def test_a_manifest_that_is_none_of_ours_is_refused(
    worker: Worker, tmp_path: Path, text: str, message: str
) -> None:
    worker.create_model(ModelKey(1), LORA)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=message):
        worker.load_state(ModelKey(1), str(tmp_path), False)


def test_a_checkpoint_deleted_while_it_is_read_is_read_all_the_same(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.create_model(ModelKey(1), FULL)
    save(worker, 1, tmp_path / "c")
    before = _logprobs(worker, 1)
    _train(worker, 1, 0, 1)
    rows = FullModel.rows

    def delete_and_read(model: FullModel, name: str) -> slice:
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        return rows(model, name)

    monkeypatch.setattr(FullModel, "rows", delete_and_read)
    worker.load_state(ModelKey(1), str(tmp_path / "c"), True)
    assert not (tmp_path / "c").exists()
    np.testing.assert_equal(_logprobs(worker, 1), before)


def test_the_manifest_tells_what_the_checkpoint_holds(
    worker: Worker, untied_model: str, tmp_path: Path
) -> None:
    worker.create_model(ModelKey(1), LORA)
    _train(worker, 1, 0, 2)
    save(worker, 1, tmp_path / "c")
    manifest = read_manifest(tmp_path / "c")
    assert (manifest.base_model, manifest.spec, manifest.step) == (untied_model, LORA, 2)
    assert manifest.optimizer == "adamw"
    files = {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"}
    assert manifest.files.keys() == files
    assert {file.name for file in (tmp_path / "c").iterdir()} == files | {"manifest.json"}
    config = json.loads((tmp_path / "c" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 32)
