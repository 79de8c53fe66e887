"""Scores of prompts: the logits with a row per token, the right adapter of lm_head, a bound on their memory.

Stock vLLM looks the adapter up in a map with a row per request. So prompts are scored with the adapters of
the requests at these rows: a wrong one, or none. If a prompt has fewer rows than there are requests, a CPU
refuses unequal sizes, and CUDA's kernels read and write beyond the logits. And it holds the logits of all
tokens of a step, twice: 10 GB for 8,192 tokens and a vocabulary of 152,000 in float32, which it did not count
when it planned its memory.

Logprobs of given tokens, and draws, are vLLM's side of inference.vllm.vllm_requests. vLLM passes such scores
from the model runner to the HTTP answer (`prompt_token_id_logprobs`), but only its second model runner
computes them, and no draws; the first one, which runs LoRA and the CPU, refuses. Here the first one computes
both, from the hidden states of the prefill, whole or in chunks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skyrl_tinker.inference.vllm.plugin.replacement import replaces
from skyrl_tinker.inference.vllm.vllm_requests import SCORES_KEY, ScoreWork, unpack_work

LOGIT_ROWS = 128
"""Most rows of a prompt's logits in memory at one time."""
PROCESSED = "processed_logprobs"
"""vLLM's --logprobs-mode in which logprobs are of the distribution that was sampled from."""


def score_with_own_adapters() -> None:
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


@dataclass
class _Progress:
    """One request's matrix [rows, columns], its rows filled from the first on."""

    work: ScoreWork
    uniforms: torch.Tensor  # [len(prompt) - 1, draws] float64
    matrix: torch.Tensor
    done: bool = False


def score_other_tokens() -> None:
    """Make vLLM compute logprobs of given tokens, and draws."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner)
    def _get_prompt_logprobs_dict(
        score: Any, self: Any, hidden_states: torch.Tensor, scheduled: dict[str, int]
    ) -> Any:
        self.skyrl_tinker_scores = _score_step(self, hidden_states, scheduled)
        return score(self, hidden_states, scheduled)

    @replaces(GPUModelRunner)
    def sample_tokens(sample: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.skyrl_tinker_scores = {}
        output = sample(self, *args, **kwargs)
        if self.skyrl_tinker_scores:
            result = getattr(output, "_model_runner_output", output)  # of an asynchronous step
            result.prompt_token_id_logprobs_dict = self.skyrl_tinker_scores
        return output


def _score_step(
    runner: Any, hidden_states: torch.Tensor, scheduled: dict[str, int]
) -> dict[str, torch.Tensor]:
    """Fill in the rows of this step; return the matrices of prompts that it completed, on the host."""
    finished = {}
    for request, count in scheduled.items():
        progress = _progress_of(runner, request)
        if progress is None or progress.done:
            continue
        with adapter_of(runner, request):
            _fill(runner, request, count, hidden_states, progress)
        state = runner.requests[request]
        if state.num_computed_tokens + count >= len(state.prompt_token_ids):
            progress.done = True  # not again after a preemption while it generates
            finished[request] = progress.matrix.cpu()
    return finished


def _progress_of(runner: Any, request: str) -> _Progress | None:
    """Return the request's progress, an attribute of its state; None if there is nothing to score."""
    state = runner.requests[request]
    packed = ((state.sampling_params and state.sampling_params.extra_args) or {}).get(SCORES_KEY)
    if packed is None:
        return None
    if not hasattr(state, SCORES_KEY):
        work = unpack_work(packed)
        uniforms = torch.from_numpy(work.uniforms()).to(runner.device)
        rows = len(work.targets) - work.first
        matrix = torch.zeros((rows, work.columns), dtype=torch.float32, device=runner.device)
        setattr(state, SCORES_KEY, _Progress(work, uniforms, matrix))
    progress: _Progress = getattr(state, SCORES_KEY)
    return progress


def _fill(runner: Any, request: str, count: int, hidden_states: torch.Tensor, progress: _Progress) -> None:
    """Fill the rows whose hidden states are in this step: token i of the prompt gives row i."""
    work = progress.work
    begin = runner.requests[request].num_computed_tokens
    offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request]]) - begin
    end = min(begin + count, len(work.targets))
    for start in range(max(begin, work.first), end, LOGIT_ROWS):
        rows = slice(start, min(start + LOGIT_ROWS, end))
        logits = runner.model.compute_logits(hidden_states[offset + rows.start : offset + rows.stop])
        filled = slice(rows.start - work.first, rows.stop - work.first)
        progress.matrix[filled] = scores(
            logits, work, rows, progress.uniforms[rows], processed=runner.sampler.logprobs_mode == PROCESSED
        )


def scores(
    logits: torch.Tensor, work: ScoreWork, rows: slice, uniforms: torch.Tensor, *, processed: bool
) -> torch.Tensor:
    """Return [rows, columns] from logits [rows, vocabulary]. Draws are made at the temperature.

    Logprobs are raw; with `processed`, as vLLM's own, those of draws are at the temperature too.
    """
    logprobs = torch.log_softmax(logits, -1, dtype=torch.float32)
    targets = torch.from_numpy(work.targets[rows].astype(np.int64)).to(logits.device)
    drawn = draw(logits, work.temperature, uniforms)
    of_draws = logprobs
    if processed and work.temperature > 0:
        of_draws = torch.log_softmax(logits / work.temperature, -1, dtype=torch.float32)
    columns = [logprobs.gather(1, targets.clamp_min(0)), of_draws.gather(1, drawn), drawn.float()]
    return torch.cat(columns, 1)  # token ids are exact in float32, being below 2**24


def draw(logits: torch.Tensor, temperature: float, uniforms: torch.Tensor) -> torch.Tensor:
    """Return [rows, draws]: for each uniform u the first token up to which the probability exceeds u."""
    if temperature == 0 or uniforms.shape[1] == 0:
        return logits.argmax(-1, keepdim=True).expand(-1, uniforms.shape[1])
    mass = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
    tokens = torch.searchsorted(mass, uniforms * mass[:, -1:], right=True)
    return tokens.clamp_max(logits.shape[1] - 1)
