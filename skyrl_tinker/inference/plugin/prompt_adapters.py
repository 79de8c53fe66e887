"""The adapter of lm_head in the logits of prompts, which have a row per token.

Stock vLLM looks that adapter up by a map with a row per request. So prompts are scored with the adapters of
the requests that have these rows: another's, or none. Where a prompt has fewer rows than there are requests,
a CPU refuses unequal sizes, and CUDA's kernels read and write beyond the logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch


def apply() -> None:
    """Have vLLM score prompts one request at a time, each with its own adapter."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    score = GPUModelRunner._get_prompt_logprobs_dict

    @wraps(score)
    def score_each(
        self: GPUModelRunner, hidden_states: torch.Tensor, scheduled: dict[str, int]
    ) -> dict[str, Any]:
        waiting = self.num_prompt_logprobs
        results: dict[str, Any] = {}
        for request in [request for request in waiting if request in scheduled]:
            self.num_prompt_logprobs = {request: waiting[request]}
            with adapter_of(self, request):
                results |= score(self, hidden_states, scheduled)
            if not self.num_prompt_logprobs:  # its prompt is scored to the end
                del waiting[request]
        self.num_prompt_logprobs = waiting
        return results

    GPUModelRunner._get_prompt_logprobs_dict = score_each  # type: ignore[method-assign, assignment]


@contextmanager
def adapter_of(runner: Any, request: str) -> Iterator[None]:
    """Context in which lm_head has the request's adapter, or none, in all rows, however many are computed."""
    from vllm.lora.layers import LogitsProcessorWithLoRA

    processors = (module for module in runner.model.modules() if isinstance(module, LogitsProcessorWithLoRA))
    wrapper: Any = next(processors).punica_wrapper
    first = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request]])
    slot = wrapper.token_lora_indices[first : first + 1]
    before = wrapper.sampler_indices.clone()
    add = wrapper.add_lora_logits

    def add_to_rows(logits: torch.Tensor, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _map_rows(wrapper, slot.expand(len(hidden_states)))
        return add(logits, hidden_states, *args, **kwargs)

    wrapper.add_lora_logits = add_to_rows
    try:
        yield
    finally:
        del wrapper.add_lora_logits
        _map_rows(wrapper, before)


def _map_rows(wrapper: Any, slots: torch.Tensor) -> None:
    """Set the slot of each row of logits, as vLLM's update_metadata does."""
    wrapper._sampler_indices[: len(slots)] = slots
    wrapper.indices_len[1] = len(slots)
    if hasattr(wrapper, "prompt_mapping_meta"):  # of CUDA's kernels
        wrapper.prompt_mapping_meta.prepare_tensors(wrapper.sampler_indices)
