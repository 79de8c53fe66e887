"""Transports to samplers that join groups of torch.distributed: over gloo on CPUs, over NCCL on GPUs.

The members load a chunk as soon as it arrives: they do not stage. Not run on a GPU yet over NCCL.
"""

import base64
from typing import TYPE_CHECKING, Any

from skyrl_tinker.domain.values import Way
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.weight_sync.broadcast import BroadcastTransport
from skyrl_tinker.weight_sync.chunks import WeightChunk
from skyrl_tinker.weight_sync.gloo import GAVE_UP, GlooSender, PortMeeting, join_gloo, open_port
from skyrl_tinker.weight_sync.nccl import NcclSender
from skyrl_tinker.weight_sync.transport import Message

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

GROUP = "weight_update_group"
"""SGLang's name for it where a message gives none."""
NCCL_ID = "0"
"""Key of a group's store at which members of the NCCL backend look for the id of its first communicator."""


class TorchGlooSender(GlooSender):
    def prepare(self) -> str:
        self.leave()
        self._meeting = PortMeeting(self._host)
        return self._meeting.address

    def meet(self, address: str, world: int) -> None:
        store, host, _ = open_port(address)
        try:
            self._group = join_gloo(_store_of(store, "cpu"), host, 0, world)
        except RuntimeError as error:  # the store is closed
            raise SamplerError(GAVE_UP) from error

    def broadcast(self, packed: "torch.Tensor") -> None:
        super().broadcast(packed)
        if self._meeting is not None:  # all have met
            self._meeting.close()


class TorchNcclSender(NcclSender):
    """Sender that joins with its first broadcast, as members of torch's groups do."""

    warms_up = False
    _meeting: PortMeeting | None = None
    _id = ""
    _world = 0

    def prepare(self) -> str:
        self._id = super().prepare()
        self._meeting = PortMeeting(self._host)
        store, _, _ = open_port(self._meeting.address)
        known: Any = _store_of(store, "cuda")  # torch's stubs lack bytes values
        known.set(NCCL_ID, base64.b64decode(self._id))
        return self._meeting.address

    def meet(self, address: str, world: int) -> None:
        self._world = world

    def broadcast(self, packed: "torch.Tensor") -> None:
        if self._group is None:
            super().meet(self._id, self._world)
        super().broadcast(packed)
        if self._meeting is not None:  # all have met
            self._meeting.close()

    def leave(self) -> None:
        super().leave()
        if self._meeting is not None:
            self._meeting.close()


class TorchGroupTransport(BroadcastTransport):
    """Transport with SGLang's messages."""

    staged = False

    def join_message(self, address: str, rank_offset: int, world: int) -> Message:
        host, _, port = address.rpartition(":")
        return {
            "master_address": host,
            "master_port": int(port),
            "rank_offset": rank_offset,
            "world_size": world,
            "backend": self.backend,
        }

    def update_message(self, chunk: WeightChunk, *, last: bool) -> Message:
        return {
            "names": chunk.names,
            "dtypes": chunk.dtypes,
            "shapes": chunk.shapes,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # a sync does it
        }


class TorchGlooTransport(TorchGroupTransport):
    backend = "gloo"
    ways: tuple[Way, Way] = ("gloo", "gloo")
    sender = TorchGlooSender


class TorchNcclTransport(TorchGroupTransport):
    backend = "nccl"
    ways: tuple[Way, Way] = ("nccl", "nccl")
    sender = TorchNcclSender


def _store_of(store: "Store", device: str) -> "Store":
    """Return the part of a store in which torch.distributed keeps the group's backend for a device."""
    from torch._C._distributed_c10d import PrefixStore

    for prefix in (GROUP, f"{GROUP}/", f"{device}/"):  # of SGLang's init_custom_process_group, of torch twice
        store = PrefixStore(prefix, store)
    return store
