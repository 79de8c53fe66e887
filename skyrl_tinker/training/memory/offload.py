"""Tensors set aside: copied to host memory, their storages freed, and brought back to the last bit.

Storages are emptied and filled in place, so that views (adapters in their flat buffer, FSDP's shards and
DTensors, tied weights) need not be known: they share the storage and are right again when it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class _Copy:
    storage: torch.UntypedStorage
    size: int  # bytes
    host: torch.Tensor | None  # [size] uint8; None: all zero


class OffloadBuffer:
    """The storages of one network or model, here or set aside."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def offload(self, tensors: Iterable[torch.Tensor], blanks: Iterable[torch.Tensor] = ()) -> None:
        """Copies still valid from last time are not made again. The device is waited for.

        `blanks`: those of the tensors that are zero, which cost nothing on the host.
        """
        if not self._copies:
            zero = {storage._cdata for storage in storages(blanks)}
            self._copies = [_copy(storage, storage._cdata in zero) for storage in storages(tensors)]
        self._finish_copies()
        for copy in self._copies:
            copy.storage.resize_(0)

    def onload(self) -> None:
        for copy in self._copies:
            copy.storage.resize_(copy.size)
            if copy.host is None:
                _bytes(copy.storage).zero_()
            else:
                _bytes(copy.storage).copy_(copy.host, non_blocking=True)
        self._finish_copies()

    def forget(self) -> None:
        """The tensors will change: what is on the host is worth nothing. Only while they are here."""
        self._copies = []

    def _finish_copies(self) -> None:
        if any(copy.storage.device.type == "cuda" for copy in self._copies):
            torch.cuda.synchronize()


def storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return list({each.untyped_storage()._cdata: each.untyped_storage() for each in local}.values())


def _copy(storage: torch.UntypedStorage, zero: bool) -> _Copy:
    return _Copy(storage, storage.nbytes(), None if zero else _to_host(storage))


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    on_gpu = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
    return host.copy_(_bytes(storage), non_blocking=on_gpu)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
