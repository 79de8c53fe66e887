"""How far a student is from its teacher in what one of the two says."""

import numpy as np
import tinker
import torch
from tinker import types
from tinker_cookbook.renderers import Renderer

from tests.cookbook.support import data
from tests.cookbook.support.kitchen import MODEL

LIKELIEST, ANSWERS, LENGTH = 8, 16, 12


def samplers(service: tinker.ServiceClient, *paths: str | None) -> list[tinker.SamplingClient]:
    """Of checkpoints; None is the base model."""
    return [service.create_sampling_client(base_model=MODEL, model_path=path).result() for path in paths]


def divergence(
    teacher: tinker.SamplingClient,
    student: tinker.SamplingClient,
    speaker: tinker.SamplingClient,
    renderer: Renderer,
) -> float:
    """KL(teacher || student) in nats, the mean over the tokens of what `speaker` answers to a question.

    The teacher is renormalised over its likeliest tokens, so this is the distillation losses' cross-entropy
    without the teacher's entropy.
    """
    question = renderer.build_generation_prompt([{"role": "user", "content": data.question(1)}])
    params = types.SamplingParams(max_tokens=LENGTH, seed=1, stop=renderer.get_stop_sequences())
    spoken = speaker.sample(question, ANSWERS, params).result().sequences
    answers = [each.tokens for each in spoken]
    found = [_at_each_token(teacher, student, question.to_ints(), answer) for answer in answers]
    return torch.cat(found).mean().item()


def _at_each_token(
    teacher: tinker.SamplingClient, student: tinker.SamplingClient, question: list[int], answer: list[int]
) -> torch.Tensor:
    """KL(teacher || student) where each token of the answer stands, [N] float64."""
    text = types.ModelInput.from_ints([*question, *answer])
    likely, q = _likeliest(teacher, text)
    p = _scores(student, text, likely)
    q = torch.log_softmax(q, dim=-1)
    return (q.exp() * (q - p)).sum(dim=-1)[-len(answer) :]


def _likeliest(sampler: tinker.SamplingClient, text: types.ModelInput) -> tuple[np.ndarray, torch.Tensor]:
    """Of each token but the first: its likeliest candidates, int64 [T - 1, K], and their logprobs."""
    params = types.SamplingParams(max_tokens=1)
    answer = sampler.sample(
        text, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=LIKELIEST
    ).result()
    assert answer.topk_prompt_logprobs is not None
    told = np.array([position[:LIKELIEST] for position in answer.topk_prompt_logprobs[1:]])
    return told[..., 0].astype(np.int64), torch.from_numpy(told[..., 1])


def _scores(sampler: tinker.SamplingClient, text: types.ModelInput, candidates: np.ndarray) -> torch.Tensor:
    """The logprobs of `candidates` [T - 1, K], of that shape."""
    params = types.SamplingParams(max_tokens=1)
    targets = types.TensorData.from_numpy(candidates)
    answer = sampler.sample(text, 1, params, target_prompt_logprobs=targets).result()
    assert answer.target_prompt_logprobs is not None
    return answer.target_prompt_logprobs.to_torch().double()
