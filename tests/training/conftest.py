"""Tiny Qwen3 directories, one of them of a mixture of experts, a process group of one, and workers on it."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.training import distributed
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.training.support.passes import perturb

torch.set_num_threads(1)


def _write_model(directory: Path, family: str, **config: Any) -> str:
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,  # far from uniform predictions, so that mistakes show
    }
    shape = AutoConfig.for_model(family, **{**small, **config})
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(shape).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = {"intermediate_size": 128, "tie_word_embeddings": True}
    return _write_model(tmp_path_factory.mktemp("tied"), "qwen3", **shape)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = {"intermediate_size": 128, "tie_word_embeddings": False}
    return _write_model(tmp_path_factory.mktemp("untied"), "qwen3", **shape)


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layers of so many inputs that BLAS multiplies up to fifteen rows in an order of its own."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1}
    return _write_model(tmp_path_factory.mktemp("wide"), "qwen3", **shape)


@pytest.fixture(scope="session")
def mixture_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven experts, which two ranks cannot share equally."""
    experts = {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    shape = {"intermediate_size": 128, "tie_word_embeddings": False}
    return _write_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", **experts, **shape)


@pytest.fixture(scope="session")
def whole_mixture_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A gpt-oss of seven experts, which are one tensor."""
    shape = {"num_local_experts": 7, "sliding_window": 16, "intermediate_size": 64}
    return _write_model(tmp_path_factory.mktemp("whole-mixture"), "gpt_oss", **shape)


@pytest.fixture(params=["tied", "untied", "mixture"])
def any_directory(request: pytest.FixtureRequest) -> str:
    directory: str = request.getfixturevalue(f"{request.param}_model")
    return directory


@pytest.fixture(params=["tied", "untied"])
def model_directory(request: pytest.FixtureRequest) -> str:
    directory: str = request.getfixturevalue(f"{request.param}_model")
    return directory


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    place = distributed.meeting_place(str(tmp_path_factory.mktemp("meeting")))
    yield distributed.join(place, 0, 1, "cpu", 60.0)
    dist.destroy_process_group()


MakeWorker = Callable[..., Worker]


@pytest.fixture
def make_worker(ranks: Ranks) -> MakeWorker:
    """Make a worker with models by number, whose adapters are perturbed; other arguments: of TrainerSpec."""

    def make(
        directory: str,
        token_budget: int = 2048,
        dtype: str = "float32",
        models: Mapping[int, LoraSpec] | None = None,
        **spec: Any,
    ) -> Worker:
        worker = Worker(TrainerSpec(directory, 1, "cpu", dtype, 1, token_budget, **spec), 0)
        worker.attach(ranks)
        for model, lora in (models or {}).items():
            worker.create_model(ModelKey(model), lora)
            perturb(worker, model)
        return worker

    return make


@pytest.fixture
def worker(make_worker: MakeWorker, untied_model: str) -> Worker:
    return make_worker(untied_model)
