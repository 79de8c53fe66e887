"""What this process keeps of the memory it freed (glibc's allocator, and CUDA's cache)."""

import ctypes
import gc
from contextlib import suppress

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_MIB = 1 << 20


def keep_freed() -> None:
    """A pass frees and asks again for the same activations: as new pages they cost a tenth of its time."""
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in ((_TRIM_THRESHOLD, 256), (_TOP_PAD, 64), (_MMAP_THRESHOLD, 32)):
            mallopt(option, size * _MIB)


def give_back() -> None:
    """Free what only cycles hold (a network under FSDP does), and let others have it."""
    gc.collect()
    uncache()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def uncache() -> None:
    """Let other processes have what is free on the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
