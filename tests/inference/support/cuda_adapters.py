"""Logits of prompts as a server on CUDA computes them: vLLM's own wrapper and kernels, interpreted on a CPU.

Runs in a process of its own: the interpreter is chosen before Triton is imported.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from skyrl_tinker.domain.samples import SampleRequest, SamplingParams, TargetTokens
from skyrl_tinker.inference.vllm.vllm_requests import SCORES_KEY, pack

HIDDEN, VOCAB, RANK, SLOTS, MOST_TOKENS = 32, 64, 16, 4, 512
Batch = Sequence[tuple[int, Sequence[int]]]
"""(LoRA id, 0 = base, prompt) of each request, scheduled whole."""


def weights() -> dict[str, Tensor]:
    """Weights in half precision, as the kernels take them; adapters move logits by several units."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"head": (VOCAB, HIDDEN), "a": (SLOTS, 1, RANK, HIDDEN), "b": (SLOTS, 1, VOCAB, RANK)}
    return {name: (torch.randn(shape, generator=generator) / 4).half() for name, shape in shapes.items()}


def hidden_states(batch: Batch) -> Tensor:
    count = sum(len(prompt) for _, prompt in batch)
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(1)).half()


def score(batch: Batch) -> dict[str, Any]:
    """Score each prompt in both ways: vLLM's prompt logprobs, and ours of given tokens; [len - 1] each.

    `kept`: whether the prompts and the maps of the samples' own logits are afterwards what they were. `rows`:
    the most rows of logits at once. `listed`: how often a prompt is copied to the device from a list.
    """
    os.environ |= {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1"}
    import vllm.triton_utils
    from vllm.triton_utils import importing

    importing.HAS_TRITON = True
    importlib.reload(vllm.triton_utils)
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from skyrl_tinker.inference.vllm.plugin import prompt_scores

    prompt_scores.score_with_own_adapters()
    prompt_scores.score_other_tokens()
    config = SimpleNamespace(max_loras=SLOTS, specialize_active_lora=False)
    wrapper = PunicaWrapperGPU(MOST_TOKENS, len(batch), "cpu", lora_config=config)
    per_token = tuple(lora for lora, prompt in batch for _ in prompt)
    mapping = LoRAMapping(per_token, tuple(lora for lora, _ in batch), is_prefill=True)
    wrapper.update_metadata(mapping, [*range(1, SLOTS), None], SLOTS, VOCAB)
    runner = _runner(batch, _model(wrapper))
    before = _maps(wrapper)
    prompts = [state.prompt_token_ids for state in runner.requests.values()]
    copies: list[type] = []
    module: Any = gpu_model_runner
    copy = module.async_tensor_h2d

    def counted(data: Any, **kwargs: Any) -> Tensor:
        copies.append(type(data))
        return copy(data, **kwargs)

    module.async_tensor_h2d = counted
    scheduled = {str(number): len(prompt) for number, (_, prompt) in enumerate(batch)}
    listed: Mapping[str, Any] = GPUModelRunner._get_prompt_logprobs_dict(
        runner, hidden_states(batch), scheduled
    )
    after = _maps(wrapper)
    same = all(
        state.prompt_token_ids is prompt
        for state, prompt in zip(runner.requests.values(), prompts, strict=True)
    )
    return {
        "logprobs": {name: lists.logprobs[:, 0].tolist() for name, lists in listed.items()},
        "scores": {name: rows[:, 0].tolist() for name, rows in runner.skyrl_tinker_scores.items()},
        "kept": before == after and same,
        "listed": copies.count(list),
        "rows": runner.model.most_rows,
    }


def _maps(wrapper: Any) -> list[Any]:
    meta = wrapper.prompt_mapping_meta.meta_args(len(wrapper.sampler_indices), True)
    return [wrapper.sampler_indices.tolist(), *(tensor.tolist() for tensor in meta)]


def _model(wrapper: Any) -> torch.nn.Module:
    """lm_head alone, with its adapters as vLLM's layer adds them."""
    from vllm.lora.layers import LogitsProcessorWithLoRA

    class Head(LogitsProcessorWithLoRA):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.punica_wrapper = wrapper
            self.weights = weights()
            self.most_rows = 0

        def compute_logits(self, rows: Tensor) -> Tensor:
            self.most_rows = max(self.most_rows, len(rows))
            logits = rows @ self.weights["head"].T
            self.punica_wrapper.add_lora_logits(logits, rows, self.weights["a"], self.weights["b"], 1.0)
            return logits

    return Head()


def _runner(batch: Batch, model: torch.nn.Module) -> Any:
    """Make what the scoring reads of vLLM's model runner."""
    from vllm.v1.sample.sampler import Sampler

    names = [str(number) for number in range(len(batch))]
    starts = torch.tensor([0, *(len(prompt) for _, prompt in batch)]).cumsum(0)
    return SimpleNamespace(
        model=model,
        device=torch.device("cpu"),
        sampler=Sampler(),
        model_config=SimpleNamespace(logprobs_mode="raw_logprobs"),
        num_prompt_logprobs=dict.fromkeys(names, 0),
        requests={name: _request(prompt) for name, (_, prompt) in zip(names, batch, strict=True)},
        input_batch=SimpleNamespace(req_id_to_index={name: index for index, name in enumerate(names)}),
        query_start_loc=SimpleNamespace(np=starts.numpy()),
        _sync_device=lambda: None,
    )


def _request(prompt: Sequence[int]) -> Any:
    targets = TargetTokens((len(prompt) - 1, 1), tuple(prompt[1:]))
    request = SampleRequest(tuple(prompt), 1, SamplingParams(max_tokens=1), target_prompt_logprobs=targets)
    return SimpleNamespace(
        prompt_token_ids=list(prompt),
        num_computed_tokens=0,
        in_progress_prompt_logprobs_cpu=None,
        sampling_params=SimpleNamespace(extra_args={SCORES_KEY: pack(request)} if len(prompt) > 1 else None),
    )
