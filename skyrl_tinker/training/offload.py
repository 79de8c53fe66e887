"""Tensors set aside: copied to host memory, their storages freed, and brought back to the last bit.

Storages are emptied and filled in place, so that views (adapters in their flat buffer, FSDP's shards and
DTensors, tied weights) need not be known: they share the storage and are right again when it is.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Aside:
    """The storages of one network or model, here or set aside."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []  # with host bytes [n], uint8

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies still valid from last time are not made again. The device is waited for."""
        if not self._copies:
            self._copies = [(storage, _to_host(storage)) for storage in _storages(tensors)]
        _finish_copies(self._copies)
        for storage, _ in self._copies:
            storage.resize_(0)

    def onload(self) -> None:
        for storage, host in self._copies:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        _finish_copies(self._copies)

    def forget(self) -> None:
        """The tensors will change: what is on the host is worth nothing. Only while they are here."""
        self._copies = []


def network_tensors(network: nn.Module) -> Iterator[torch.Tensor]:
    """Shards, gradients and buffers (also those that no checkpoint holds), whole weights given up first."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for parameter in network.parameters():
        yield parameter.detach()
        if parameter.grad is not None:
            yield parameter.grad
    yield from network.buffers()


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return list({each.untyped_storage()._cdata: each.untyped_storage() for each in local}.values())


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    on_gpu = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
    return host.copy_(_bytes(storage), non_blocking=on_gpu)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish_copies(copies: Sequence[tuple[torch.UntypedStorage, torch.Tensor]]) -> None:
    if any(storage.device.type == "cuda" for storage, _ in copies):
        torch.cuda.synchronize()
