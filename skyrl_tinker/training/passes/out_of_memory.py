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


def refuse_rows(batch: TrainingInputBatch, tokens: int, token_budget: int, reason: str) -> RankOutput:
    """Fail all requests of a pass for which there was no memory in rows of `tokens` tokens."""
    _log.warning("out of memory in rows of %d tokens: %s", tokens, reason)
    return _refuse(
        batch,
        f"{len(batch.tokens)} tokens in {len(batch.lengths)} datums did not fit into the trainer's memory in "
        f"rows of {tokens} tokens (token_budget is {token_budget}); the longest datum has "
        f"{batch.lengths.max()} tokens. Send shorter sequences, or start the server with a smaller "
        "--token-budget, with --gradient-checkpointing or with more trainer ranks",
    )


def refuse_models(batch: TrainingInputBatch, reason: str) -> RankOutput:
    """Fail all requests of a pass for whose models there was no memory on the device, before any row."""
    _log.warning("out of memory as models were brought onto the device: %s", reason)
    return _refuse(
        batch,
        f"a trainer rank ran out of memory ({reason}) as it brought models back onto its device, however "
        "long the sequences are: send the request again, or start the server with fewer resident models or "
        "more trainer ranks",
    )


def _refuse(batch: TrainingInputBatch, why: str) -> RankOutput:
    allocator.give_back()
    failure = Failure(f"{why}; no gradients were left", "server")
    failures = dict.fromkeys(range(len(batch.requests)), failure)
    return RankOutput((), np.empty(0, np.float32), {}, failures, exhausted=True)
