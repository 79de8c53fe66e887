"""How far a student is from its teacher at what an assistant says."""

import numpy as np
import tinker
import torch
from tinker import types
from tinker_cookbook.renderers import Renderer, TrainOnWhat

from . import data
from .kitchen import MODEL, Row


def divergence(
    service: tinker.ServiceClient, renderer: Renderer, teacher: str | None, student: str | None
) -> float:
    """KL(teacher || student) in nats over the teacher's 8 likeliest tokens, its mean over a lesson's answers.

    Each is a sampler's path, None the base model; both are renormalised over those tokens.
    """
    tokens, said = _rendered(renderer, data.lessons(1, turns=2)[0])
    likely, q = _likeliest(_sampler(service, teacher), tokens, 8)
    p = _scores(_sampler(service, student), tokens, likely)
    q, p = (torch.log_softmax(each[said], dim=-1) for each in (q, p))
    return float(torch.nn.functional.kl_div(p, q, log_target=True, reduction="batchmean"))


def _sampler(service: tinker.ServiceClient, path: str | None) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=MODEL, model_path=path).result()


def _rendered(renderer: Renderer, lesson: Row) -> tuple[list[int], torch.Tensor]:
    """A conversation's tokens [T], and which of tokens[1:] the assistant says, bool [T - 1]."""
    said = TrainOnWhat.ALL_ASSISTANT_MESSAGES
    model_input, weights = renderer.build_supervised_example(lesson["messages"], train_on_what=said)
    return model_input.to_ints(), weights[1:] > 0


def _likeliest(sampler: tinker.SamplingClient, tokens: list[int], k: int) -> tuple[np.ndarray, torch.Tensor]:
    """The k likeliest tokens at each of tokens[1:], int64 [T - 1, k], and their logprobs."""
    prompt = types.ModelInput.from_ints(tokens)
    params = types.SamplingParams(max_tokens=1)
    answer = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=k).result()
    assert answer.topk_prompt_logprobs is not None
    told = np.array([position[:k] for position in answer.topk_prompt_logprobs[1:]])
    return told[..., 0].astype(np.int64), torch.from_numpy(told[..., 1])


def _scores(sampler: tinker.SamplingClient, tokens: list[int], candidates: np.ndarray) -> torch.Tensor:
    """Logprobs of `candidates` [T - 1, k] at tokens[1:], of that shape."""
    prompt = types.ModelInput.from_ints(tokens)
    params = types.SamplingParams(max_tokens=1)
    targets = types.TensorData.from_numpy(candidates)
    answer = sampler.sample(prompt, 1, params, target_prompt_logprobs=targets).result()
    assert answer.target_prompt_logprobs is not None
    return answer.target_prompt_logprobs.to_torch().double()
