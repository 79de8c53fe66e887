"""The logits of prompts, with a row per token: the right adapter of lm_head, and a bound on their memory.

Stock vLLM looks the adapter up in a map with a row per request. So prompts are scored with the adapters of
the requests at these rows: a wrong one, or none. If a prompt has fewer rows than there are requests, a CPU
refuses unequal sizes, and CUDA's kernels read and write beyond the logits. And it holds the logits of all
tokens of a step, twice: 10 GB for 8,192 tokens and a vocabulary of 152,000 in float32, which it did not count
when it planned its memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from skyrl_tinker.inference.vllm.plugin.replacement import replaces

LOGIT_ROWS = 128
"""Most rows of a prompt's logits in memory at one time."""


def apply() -> None:
    """Make vLLM score prompts request by request, each with its adapter, LOGIT_ROWS tokens at a time."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner)
    def _get_prompt_logprobs_dict(
        score: Any, self: Any, hidden_states: torch.Tensor, scheduled: dict[str, int]
    ) -> dict[str, Any]:
        waiting = self.num_prompt_logprobs
        results: dict[str, Any] = {}
        for request in [request for request in waiting if request in scheduled]:
            self.num_prompt_logprobs = {request: waiting[request]}
            with adapter_of(self, request), _prompt_as_tensor(self.requests[request]):
                for start in range(0, scheduled[request], LOGIT_ROWS):
                    count = min(LOGIT_ROWS, scheduled[request] - start)
                    with _computed(self.requests[request], start):
                        results |= score(self, hidden_states[start:], {request: count})
            if not self.num_prompt_logprobs:  # its prompt is scored to the end
                del waiting[request]
        self.num_prompt_logprobs = waiting
        return results


@contextmanager
def _prompt_as_tensor(state: Any) -> Iterator[None]:
    """Context in which a request's prompt is a host tensor; otherwise vLLM would make one for each slice."""
    tokens = state.prompt_token_ids
    if tokens is not None:  # None: a prompt of embeddings, which is not scored
        state.prompt_token_ids = torch.tensor(tokens)
    try:
        yield
    finally:
        state.prompt_token_ids = tokens


@contextmanager
def _computed(state: Any, more: int) -> Iterator[None]:
    """Context in which `more` further tokens of a request count as computed by earlier steps."""
    state.num_computed_tokens += more
    try:
        yield
    finally:
        state.num_computed_tokens -= more


@contextmanager
def adapter_of(runner: Any, request: str) -> Iterator[None]:
    """Context in which lm_head uses the request's adapter, or none, for any number of rows."""
    from vllm.lora.layers import LogitsProcessorWithLoRA

    processors = (module for module in runner.model.modules() if isinstance(module, LogitsProcessorWithLoRA))
    processor = next(processors, None)
    if processor is None:  # this server takes no adapters
        yield
        return
    wrapper: Any = processor.punica_wrapper
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
