"""Offload of tensors: copied to host memory, their storages freed, and restored to the last bit.

Storages are emptied and filled in place, so that views (adapters in their flat buffer, FSDP's shards and
DTensors, tied weights) need not be known: they share the storage and are valid again when it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class _Copy:
    storage: torch.UntypedStorage
    size: int  # bytes
    host: torch.Tensor | None  # [size] uint8; None: all zero


class OffloadBuffer:
    """Storages of one network or model, on the device or offloaded."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def offload(self, tensors: Iterable[torch.Tensor], blanks: Iterable[torch.Tensor] = ()) -> None:
        """Offload the tensors, reusing copies that are still valid, and wait for the device.

        `blanks`: tensors among these that are all zero; they take no host memory.
        """
        if not self._copies:
            zero = {storage._cdata for storage in storages(blanks)}
            self._copies = [
                _Copy(storage, storage.nbytes(), None if storage._cdata in zero else _to_host(storage))
                for storage in storages(tensors)
            ]
        self._finish_copies()
        for copy in self._copies:
            copy.storage.resize_(0)

    def onload(self) -> None:
        """Restore all of them, or none when that fails."""
        try:
            for copy in self._copies:
                copy.storage.resize_(copy.size)
                if copy.host is None:
                    _bytes(copy.storage).zero_()
                else:
                    _bytes(copy.storage).copy_(copy.host, non_blocking=True)
        except BaseException:  # of any kind: a partial restore must not look complete
            for copy in self._copies:
                copy.storage.resize_(0)
            raise
        self._finish_copies()

    def blank(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have these offloaded tensors be zero when they are restored."""
        zero = {storage._cdata for storage in storages(tensors)}
        self._copies = [
            replace(copy, host=None) if copy.storage._cdata in zero else copy for copy in self._copies
        ]

    def forget(self) -> None:
        """Invalidate the host copies, because the tensors will change. Only while they are on the device."""
        self._copies = []

    def _finish_copies(self) -> None:
        if any(copy.storage.device.type == "cuda" for copy in self._copies):
            torch.cuda.synchronize()


def storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors, each once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in local}.values())


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    on_gpu = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
    return host.copy_(_bytes(storage), non_blocking=on_gpu)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
