"""On CUDA, too, a prompt is scored with its own adapter of lm_head: vLLM's kernels, interpreted on a CPU."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests.inference.support.cuda_adapters import Batch, hidden_states, score, weights
from tests.inference.support.samplers import prompt_of

pytestmark = pytest.mark.long  # one batch takes half a minute


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(score, _batch()).result()


@pytest.mark.parametrize("kind", ["logprobs", "scores"])
def test_on_cuda_prompts_are_scored_with_their_own_adapter(found: dict[str, Any], kind: str) -> None:
    expected = _plain(_batch())
    for name in (name for name, logprobs in expected.items() if len(logprobs)):
        np.testing.assert_allclose(found[kind][name], expected[name], atol=0.02, err_msg=name)


def test_samples_beside_them_keep_their_adapters(found: dict[str, Any]) -> None:
    assert found["kept"]


def test_few_rows_of_logits_are_held_at_once(found: dict[str, Any]) -> None:
    assert found["rows"] == 128 < max(len(prompt) for _, prompt in _batch())


def test_a_prompt_is_read_from_its_list_once_not_for_each_slice(found: dict[str, Any]) -> None:
    assert found["listed"] == 0


def _batch() -> Batch:
    """Base and adapters in turn; a prompt longer than a slice of logits, others shorter than the batch."""
    prompts = [(0, 1), (0, 30), (0, 5), (2, 2), (2, 200), (1, 3), (1, 2), *((1, 1) for _ in range(8))]
    return [(lora, _prompt(length)) for lora, length in prompts]


def _prompt(length: int) -> list[int]:
    return [token % 64 for token in prompt_of(length, seed=length)]


def _plain(batch: Batch) -> dict[str, Any]:
    """Compute the logprobs of each prompt's tokens by plain products."""
    tensors = {name: tensor.float() for name, tensor in weights().items()}
    rows = hidden_states(batch).float().split([len(prompt) for _, prompt in batch])
    expected = {}
    for number, ((lora, prompt), states) in enumerate(zip(batch, rows, strict=True)):
        logits = states @ tensors["head"].T
        if lora:
            slot = lora - 1
            logits += states @ tensors["a"][slot, 0].T @ tensors["b"][slot, 0].T
        logprobs = torch.log_softmax(logits, -1)[:-1]
        expected[str(number)] = logprobs.gather(1, torch.tensor(prompt)[1:, None])[:, 0].numpy()
    return expected
