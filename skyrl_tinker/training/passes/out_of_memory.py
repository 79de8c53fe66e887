"""Refusal of a pass that does not fit into memory, by all ranks alike: the engine runs it in smaller rows.

If the kernel killed a rank, the engine does the same with fresh ones.
"""

import logging

import numpy as np

from skyrl_tinker.domain.values import Failure
from skyrl_tinker.training.batching.batch import TrainingInputBatch
from skyrl_tinker.training.batching.outputs import RankOutput
from skyrl_tinker.training.memory import allocator

_log = logging.getLogger(__name__)


def refuse(batch: TrainingInputBatch, tokens: int, token_budget: int, reason: str) -> RankOutput:
    """Fail all requests of a pass for which there was no memory in rows of `tokens` tokens."""
    _log.warning("out of memory in rows of %d tokens: %s", tokens, reason)
    allocator.give_back()
    failure = Failure(
        f"{len(batch.tokens)} tokens in {len(batch.lengths)} datums did not fit into the trainer's memory in "
        f"rows of {tokens} tokens (token_budget is {token_budget}); the longest datum has "
        f"{batch.lengths.max()} tokens. Send shorter sequences, or start the server with a smaller "
        "--token-budget, with --gradient-checkpointing or with more trainer ranks; no gradients were left",
        "server",
    )
    failures = dict.fromkeys(range(len(batch.requests)), failure)
    return RankOutput((), np.empty(0, np.float32), {}, failures, exhausted=True)
