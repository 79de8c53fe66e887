"""Tiny Qwen3 directories, one of them of a mixture of experts, a process group of one, and workers on it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_tinker.training import distributed
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker

torch.set_num_threads(1)


def _write_model(directory: Path, *, tied: bool, experts: int = 0) -> str:
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = AutoConfig.for_model(
        "qwen3_moe" if experts else "qwen3",
        **(mixture if experts else {}),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=32,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=512,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # far from uniform predictions, so that mistakes show
    )
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _write_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _write_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def mixture_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven experts, which two ranks cannot share equally."""
    return _write_model(tmp_path_factory.mktemp("mixture"), tied=False, experts=7)


@pytest.fixture(scope="session")
def whole_mixture_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A gpt-oss of seven experts, which are one tensor."""
    directory = tmp_path_factory.mktemp("whole-mixture")
    sizes = {"num_local_experts": 7, "num_hidden_layers": 2, "vocab_size": 512, "sliding_window": 16}
    config = AutoConfig.for_model(
        "gpt_oss",
        **sizes,
        hidden_size=64,
        num_attention_heads=4,
        head_dim=32,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.fixture(params=["tied", "untied"])
def model_directory(request: pytest.FixtureRequest) -> str:
    directory: str = request.getfixturevalue(f"{request.param}_model")
    return directory


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    yield distributed.join(distributed.meeting_place(), 0, 1, "cpu", 60.0)
    dist.destroy_process_group()


MakeWorker = Callable[..., Worker]


@pytest.fixture
def make_worker(ranks: Ranks) -> MakeWorker:
    def make(directory: str, token_budget: int = 2048, dtype: str = "float32") -> Worker:
        worker = Worker(TrainerSpec(directory, 1, "cpu", dtype, 1, token_budget), 0)
        worker.attach(ranks)
        return worker

    return make


@pytest.fixture
def worker(make_worker: MakeWorker, untied_model: str) -> Worker:
    return make_worker(untied_model)
