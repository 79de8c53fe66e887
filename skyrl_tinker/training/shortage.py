"""Lack of memory on one rank, made known to all, so that none of them waits in a collective for another.

Errors of the allocators are caught here. A process that the kernel kills reports nothing: then the engine
starts fresh ranks.
"""

from collections.abc import Callable

import torch

from skyrl_tinker.errors import ExhaustedError
from skyrl_tinker.training.distributed import Ranks

_MESSAGES = ("can't allocate memory", "std::bad_alloc", "CUDA error: out of memory")
"""Messages of RuntimeErrors that mean exhausted memory: of PyTorch's CPU allocator, of C++ below it, and of
CUDA for pinned host memory.
"""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


class Shortage:
    """Lack of memory on this rank, if any; its peers learn of it at the next `agree`."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def __bool__(self) -> bool:
        return self._reason is not None

    def survive(self, work: Callable[[], object]) -> bool:
        """Do work without collectives, or for which peers may wait; returns False if memory ran out in it."""
        try:
            work()
            return True
        except Exception as error:  # of any type: allocators report it by several
            if not is_out_of_memory(error):
                raise
            reason = (str(error).splitlines() or [repr(error)])[0]
            self._reason = self._reason or reason
        return False  # not above: the error's traceback keeps the work's allocations alive

    def report(self) -> None:
        """Raise ExhaustedError where memory ran out on this rank."""
        if self._reason is not None:
            raise ExhaustedError(self._reason)

    def agree(self, ranks: Ranks, flags: list[bool] | None = None) -> list[bool]:
        """Return for each flag whether any rank sets it. Raises ExhaustedError if memory ran out on any."""
        *found, exhausted = ranks.any_([*(flags or ()), bool(self)])
        if exhausted:
            ranks.together(self.report)
        return found
