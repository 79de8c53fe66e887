"""Refusal of a pass that does not fit into memory, by all ranks alike: the engine runs it in smaller rows.

Errors of the allocators are caught here. A process that the kernel kills reports nothing: then the engine
does the same with fresh ranks.
"""

import logging
from collections.abc import Callable

import numpy as np
import torch

from skyrl_tinker.domain.values import Failure
from skyrl_tinker.training.batching.batch import TrainingInputBatch
from skyrl_tinker.training.batching.outputs import RankOutput
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory import allocator

_log = logging.getLogger(__name__)
_CPU_MESSAGES = ("can't allocate memory", "std::bad_alloc")
"""Messages of RuntimeErrors that mean exhausted memory: PyTorch's CPU allocator, and C++ below it."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _CPU_MESSAGES)


class ExhaustedError(Exception):
    """Memory ran out on a rank. All ranks raise it, in the same place."""


class Shortage:
    """Lack of memory on this rank, if there is any, of which its peers hear where they next agree."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def __bool__(self) -> bool:
        return self._reason is not None

    def survive(self, work: Callable[[], None]) -> bool:
        """Do work without collectives, or that lets peers wait; returns False if memory ran out in it."""
        try:
            work()
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = (str(error).splitlines() or [repr(error)])[0]
            self._reason = self._reason or reason
        return False  # not above: the error's traceback keeps what the work had allocated

    def agree(self, ranks: Ranks, flags: list[bool] | None = None) -> list[bool]:
        """Return where the flag is set on any rank. Raises ExhaustedError where memory ran out on any."""
        *found, exhausted = ranks.any_([*(flags or ()), bool(self)])
        if exhausted:
            raise ExhaustedError(self._reason or "on another rank")
        return found


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
