"""Refusal of a pass that does not fit into memory: the engine runs it again later, in smaller rows.

Errors of the allocators are caught here. A process that the kernel kills reports nothing, and of several
ranks the others wait in a collective: then the engine does the same with fresh ranks.
"""

import logging
from collections.abc import Callable

import numpy as np
import torch

from skyrl_tinker.domain.values import Failure
from skyrl_tinker.training.batching.batch import TrainingInputBatch
from skyrl_tinker.training.batching.outputs import RankOutput

_log = logging.getLogger(__name__)
_CPU_MESSAGES = ("can't allocate memory", "std::bad_alloc")
"""Messages of RuntimeErrors that mean exhausted memory: PyTorch's CPU allocator, and C++ below it."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _CPU_MESSAGES)


def run_or_refuse(
    batch: TrainingInputBatch,
    tokens: int,
    token_budget: int,
    run: Callable[[int], RankOutput],
    recover: Callable[[], None],
) -> RankOutput:
    """Call `run(tokens per row)`, which undoes itself on errors; if memory runs out, all requests fail.

    `recover` makes the worker fit to run again.
    """
    try:
        return run(tokens)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).splitlines() or [repr(error)])[0]
        _log.warning("out of memory in rows of %d tokens: %s", tokens, reason)
    recover()  # not above: the error's traceback keeps what the pass had allocated
    failure = Failure(
        f"{len(batch.tokens)} tokens in {len(batch.lengths)} datums did not fit into the trainer's memory in "
        f"rows of {tokens} tokens (token_budget is {token_budget}); the longest datum has "
        f"{batch.lengths.max()} tokens. Send shorter sequences, or start the server with a smaller "
        "--token-budget, with --gradient-checkpointing or with more trainer ranks; no gradients were left",
        "server",
    )
    failures = dict.fromkeys(range(len(batch.requests)), failure)
    return RankOutput((), np.empty(0, np.float32), {}, failures, exhausted=True)
