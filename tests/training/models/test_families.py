"""Every family that is served: packed rows and files equal Hugging Face, one sequence at a time."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import Datum, LoraSpec
from skyrl_tinker.errors import UserError
from skyrl_tinker.server.base_models.tiny_families import FAMILIES, WINDOW
from skyrl_tinker.training.checkpoints import checkpoint_save
from skyrl_tinker.training.checkpoints.peft_import import convert, read_foreign
from skyrl_tinker.training.models.mixtures import find_mixtures, layout_of
from skyrl_tinker.training.worker import Worker
from tests.support.peft_adapters import token_logprobs
from tests.support.tiny_models import write_tiny
from tests.training.conftest import MakeWorker
from tests.training.support import reference
from tests.training.support.passes import (
    assert_close,
    assert_equal,
    gradients_of,
    make_data,
    make_item,
    run_one,
    step,
    weights_of,
)
from tests.training.support.saves import save, write_weights

FULL, LORA, COPY = 1, 2, 3
SPECS = {FULL: LoraSpec(0, 0), LORA: LoraSpec(8, 1)}
LENGTHS = (3 * WINDOW, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 1, 5)
DATA = make_data(LENGTHS, 1)  # one row
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, {}) for arch in FAMILIES},
    "qwen3 with a window": ("qwen3", QWEN_WINDOW),
    "mistral without a window": ("mistral", {"sliding_window": None}),
}

# PEFT warns of what is meant here: a head is adapted, and a tied embedding left alone.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]


@pytest.fixture(params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    arch, config = MODELS[request.param]
    # three layers of gemma3: one that sees all between two with a window
    write_tiny(tmp_path / "model", arch=arch, layers=3, tied=arch != "llama", **config)
    return str(tmp_path / "model")


@pytest.fixture
def trainer(make_worker: MakeWorker, directory: str) -> Worker:
    return make_worker(directory, models=SPECS)


def _logprobs(worker: Worker, model: int, data: Sequence[Datum] = DATA) -> Sequence[np.ndarray]:
    return run_one(worker, make_item(model, tuple(data), backward=False)).logprobs


def _whole_experts(worker: Worker) -> bool:
    """Return whether an adapter has the pairs of all experts in one tensor, as PEFT has."""
    return any(layout_of(mixture).whole for mixture in find_mixtures(worker._base).values())


def _assert_close(found: Sequence[np.ndarray], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), atol=1e-5, rtol=1e-5)


def _by_transformers(model: torch.nn.Module) -> list[torch.Tensor]:
    return [token_logprobs(model, datum.tokens.tolist(), datum.target_tokens.tolist()) for datum in DATA]


def test_full_parameters_compute_what_hugging_face_does(trainer: Worker, directory: str) -> None:
    plain = reference.load(directory)
    plain.set_attn_implementation("eager")
    output = run_one(trainer, make_item(FULL, DATA))
    _assert_close(output.logprobs, _by_transformers(plain))
    reference.loss_of(plain, DATA, reference.cross_entropy).backward()
    network: Any = trainer._models[ModelKey(FULL)]
    found = {name: weight.grad.full_tensor() for name, weight in network.network.causal_lm.named_parameters()}
    expected = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    assert_close(found, expected, 1e-5)


def test_adapters_compute_what_merged_weights_do(trainer: Worker, directory: str) -> None:
    plain, adapter = reference.load(directory), weights_of(trainer, LORA)
    merged = reference.merge(plain, adapter)
    output = run_one(trainer, make_item(LORA, DATA))
    _assert_close(output.logprobs, [reference.logprobs(plain, datum, merged) for datum in DATA])
    _, expected = reference.adapter_gradients(directory, adapter, DATA, reference.cross_entropy)
    # gpt-oss: each of the two is 8e-6 from the same in float64
    tolerance = 2e-5 if _whole_experts(trainer) else 1e-5
    assert_close(gradients_of(trainer, LORA), expected, tolerance)


def test_a_sequence_does_not_see_its_neighbours(trainer: Worker) -> None:
    """Some CPUs' BLAS adds up in another order for few tokens alone: those have others beside them, too."""
    few = DATA[-1]
    others = (*make_data(LENGTHS[:-1], 2), few)
    for model in SPECS:
        *together, beside = _logprobs(trainer, model)
        for datum, found in zip(DATA, together, strict=False):
            np.testing.assert_array_equal(found, _logprobs(trainer, model, (datum,))[0])
        np.testing.assert_array_equal(beside, _logprobs(trainer, model, others)[-1])
        np.testing.assert_allclose(beside, _logprobs(trainer, model, (few,))[0], rtol=1e-6)


@pytest.mark.parametrize("model", SPECS)
def test_training_goes_on_from_a_checkpoint(trainer: Worker, tmp_path: Path, model: int) -> None:
    _train(trainer, model)
    save(trainer, model, tmp_path / "saved")
    trainer.create_model(ModelKey(COPY), SPECS[model])
    trainer.load_state(ModelKey(COPY), str(tmp_path / "saved"), True)
    assert_equal(weights_of(trainer, COPY), weights_of(trainer, model))
    for each in (model, COPY):
        _train(trainer, each)
    assert_equal(weights_of(trainer, COPY), weights_of(trainer, model))


def _train(worker: Worker, model: int) -> None:
    run_one(worker, make_item(model, DATA))
    step(worker, model)


def test_transformers_loads_full_parameters_for_samplers(
    trainer: Worker, directory: str, tmp_path: Path
) -> None:
    _train(trainer, FULL)
    write_weights(trainer, FULL, tmp_path / "weights")
    shutil.copy(Path(directory, "config.json"), tmp_path / "weights")
    _assert_close(_logprobs(trainer, FULL), _by_transformers(reference.load(str(tmp_path / "weights"))))


def test_peft_loads_an_adapter_and_its_copy_is_taken_back(
    trainer: Worker, directory: str, tmp_path: Path
) -> None:
    expected = _logprobs(trainer, LORA)
    write_weights(trainer, LORA, tmp_path / "ours", durable=True)
    peft = PeftModel.from_pretrained(reference.load(directory), str(tmp_path / "ours"))
    _assert_close(expected, _by_transformers(peft))
    peft.save_pretrained(str(tmp_path / "theirs"))
    if find_mixtures(trainer._base) and not _whole_experts(trainer):
        with pytest.raises(UserError, match=r"target_parameters is .*, expected nothing: not plain LoRA"):
            read_foreign(tmp_path / "theirs")  # one pair for two projections is of twice the rank
        shutil.copytree(tmp_path / "ours", tmp_path / "theirs", dirs_exist_ok=True)
    model = convert(read_foreign(tmp_path / "theirs"), directory)
    file = tmp_path / "theirs" / "adapter_config.json"
    config = json.loads(file.read_text()) | {"use_rslora": True}
    if config.get("rank_pattern"):
        file.write_text(json.dumps(config))
        with pytest.raises(UserError, match=r"_pattern is .*, expected nothing: not plain LoRA"):
            read_foreign(tmp_path / "theirs")  # PEFT scales the experts by the root of another rank
    captured = checkpoint_save.capture(model, directory, optimizer=False, rank=0, world=1)
    files = checkpoint_save.persist(captured, tmp_path / "scratch")
    checkpoint_save.commit(captured.contents, files, tmp_path / "scratch", tmp_path / "back")
    trainer.create_model(ModelKey(COPY), model.spec)
    trainer.load_state(ModelKey(COPY), str(tmp_path / "back"), False)
    for found, other in zip(_logprobs(trainer, COPY), expected, strict=True):
        np.testing.assert_array_equal(found, other)
