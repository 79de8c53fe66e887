"""Logprobs of given tokens, and draws, for prompts: the vLLM side of inference.vllm.vllm_requests.

vLLM passes such scores from the model runner to the HTTP answer (`prompt_token_id_logprobs`), but only its
second model runner computes them, and no draws; the first one, which runs LoRA and the CPU, refuses. Here the
first one computes both, from the hidden states of the prefill, whole or in chunks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skyrl_tinker.inference.vllm.plugin.prompt_adapters import LOGIT_ROWS, adapter_of
from skyrl_tinker.inference.vllm.plugin.replacement import replaces
from skyrl_tinker.inference.vllm.vllm_requests import SCORES_KEY, ScoreWork, unpack_work

PROCESSED = "processed_logprobs"
"""vLLM's --logprobs-mode in which logprobs are of the distribution that was sampled from."""


@dataclass
class _Progress:
    """One request's matrix [rows, columns], its rows filled from the first on."""

    work: ScoreWork
    uniforms: torch.Tensor  # [len(prompt) - 1, draws] float64
    matrix: torch.Tensor
    done: bool = False


def apply() -> None:
    """Patch vLLM; once per process."""
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
