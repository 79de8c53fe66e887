"""Files of float32 in memory (tmpfs), mapped into this process, whose contents outlive it.

Files are kept and written again, since fresh pages cost several times what copying into old ones does.
"""

import errno
import itertools
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

SHARE = 4
"""A new file may take 1/SHARE of the available memory, which safety must not use up."""

SPARE_SHARE = 8
"""Unused files may take 1/SPARE_SHARE of it."""


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    tensor: torch.Tensor  # [elements] float32; what is written here is in the file


class StateFiles:
    """Files of one process, which owns the names with `prefix`. `pinned`: for copies from a GPU."""

    def __init__(self, directory: Path, prefix: str, *, pinned: bool) -> None:
        self._directory = directory
        self._prefix = prefix
        self._pinned = pinned
        self._numbers = itertools.count()
        self._used: dict[str, _File] = {}
        self._spare: dict[int, list[_File]] = {}  # by elements
        self._spare_bytes = 0

    def write(self, tensors: Collection[torch.Tensor]) -> str:
        """Write the tensors end to end into a file and return its name. Raises OSError when memory is short.

        Copies from a GPU are complete after a synchronisation.
        """
        elements = sum(tensor.numel() for tensor in tensors)
        file = self._take(max(1, elements))
        self._used[file.path.name] = file
        start = 0
        for tensor in tensors:
            part = file.tensor[start : start + tensor.numel()]
            part.view(tensor.shape).copy_(tensor, non_blocking=self._pinned)
            start += tensor.numel()
        return file.path.name

    def read(self, name: str, tensors: Collection[torch.Tensor]) -> None:
        """Fill the tensors from a file of any process, as `write` writes it."""
        flat = _map(self._directory / name)
        start = 0
        for tensor in tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()

    def adopt(self, names: Collection[str]) -> None:
        """Take over these files of a process that has ended, and remove its others."""
        for path in self._directory.glob(f"{self._prefix}-*"):
            if path.name in names:
                self._used[path.name] = self._opened(path)
            else:
                path.unlink()
        taken = [int(name.rpartition("-")[2]) for name in self._used]
        self._numbers = itertools.count(max(taken, default=0) + 1)

    def free_all_but(self, names: Collection[str]) -> None:
        """Free all other files for reuse."""
        done = self._used.keys() - names
        limit = psutil.virtual_memory().available // SPARE_SHARE if done else 0
        for name in done:
            self._put_aside(self._used.pop(name), limit)

    def _take(self, elements: int) -> _File:
        spare = self._spare.get(elements)
        if spare:
            file = spare.pop()
            self._spare_bytes -= file.tensor.nbytes
            return file
        return self._made(elements * torch.float32.itemsize)

    def _put_aside(self, file: _File, limit: int) -> None:
        if self._spare_bytes + file.tensor.nbytes > limit:
            self._remove(file)
            return
        self._spare_bytes += file.tensor.nbytes
        self._spare.setdefault(file.tensor.numel(), []).append(file)

    def _made(self, size: int) -> _File:
        if size > psutil.virtual_memory().available / SHARE:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        path = self._directory / f"{self._prefix}-{next(self._numbers)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # not when it is written: that would be a SIGBUS
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        return self._opened(path)

    def _opened(self, path: Path) -> _File:
        file = _File(path, _map(path))
        if self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(file.tensor.data_ptr(), file.tensor.nbytes, 0))
        return file

    def _remove(self, file: _File) -> None:
        if self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostUnregister(file.tensor.data_ptr()))
        file.path.unlink()


def _map(path: Path) -> torch.Tensor:
    size = path.stat().st_size
    return torch.from_file(str(path), shared=True, size=size // torch.float32.itemsize, dtype=torch.float32)
