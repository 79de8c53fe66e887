"""Both ends of every transport in one process: no Ray, no servers, but vLLM's own messages and unpacking."""

import asyncio
import base64
import math
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from queue import Queue
from typing import Any, Protocol
from unittest.mock import patch

import orjson
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import Backend, ProcessGroupGloo, destroy_process_group
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous
from vllm.distributed.weight_transfer import packed_tensor
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from skyrl_tinker.inference.vllm.plugin.weight_receiver import StagedInit, StagedUpdate
from skyrl_tinker.system.listeners import closing_new_listeners
from skyrl_tinker.training.weight_share import WeightShare
from skyrl_tinker.weight_sync.chunk_buffer import ChunkSource
from skyrl_tinker.weight_sync.chunks import WeightChunk
from skyrl_tinker.weight_sync.cuda_ipc import CudaIpcSender, CudaIpcTransport
from skyrl_tinker.weight_sync.gloo import GlooReceiver, GlooTransport
from skyrl_tinker.weight_sync.nccl import NcclSender, NcclTransport
from skyrl_tinker.weight_sync.shared_memory import MappedFiles, SharedMemoryTransport
from skyrl_tinker.weight_sync.torch_groups import GROUP, TorchGlooTransport
from skyrl_tinker.weight_sync.transport import ChunkSender, Message, WeightSource, WeightTransport

Tensors = dict[str, Tensor]
MEMBER_S = timedelta(seconds=60)
GPUS = ("GPU-0", "GPU-1", "GPU-2")


class Receiver(Protocol):
    def join(self, init: dict[str, Any]) -> None: ...
    def receive(self, update: dict[str, Any]) -> Tensors: ...


class ThreadSenders:
    """Ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._factory: Callable[[int], Any] | None = None
        self.senders: list[Any] = []
        self.restarts = 0

    async def restart(self) -> None:
        assert self._factory is not None
        self.restarts += 1
        await self.open_sender(self._factory)

    async def open_sender(self, factory: Callable[[int], Any]) -> None:
        self._factory = factory
        self.senders = [factory(rank) for rank in range(self._ranks)]

    async def sender_call(self, method: str, *args: Any) -> list[Any]:
        calls = [asyncio.to_thread(getattr(sender, method), *args) for sender in self.senders]
        return list(await asyncio.gather(*calls))

    async def root_call(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(getattr(self.senders[0], method), *args)


class HeldByThreads:
    """Weights dealt over the ranks of `senders`, each of which holds its own."""

    def __init__(self, senders: ThreadSenders, dealt: Sequence[Tensors], dtype: torch.dtype) -> None:
        self._senders = senders
        shapes = [{name: tuple(tensor.shape) for name, tensor in share.items()} for share in dealt]
        self._shares = [
            WeightShare(rank, dtype, shapes, share, group)
            for rank, (share, group) in enumerate(zip(dealt, groups(len(dealt)), strict=True))
        ]

    async def open_in_senders(self, limit: int) -> list[Any]:
        pairs = zip(self._senders.senders, self._shares, strict=True)
        return list(
            await asyncio.gather(
                *(asyncio.to_thread(sender.open_captured, share, limit) for sender, share in pairs)
            )
        )


def groups(ranks: int) -> list[Any]:
    """Return the group of all ranks as each has it."""
    if ranks == 1:
        return [None]
    store = HashStore()
    with ThreadPoolExecutor(ranks) as threads:
        return list(
            threads.map(
                lambda rank: ProcessGroupGloo(store, rank, ranks, timedelta(seconds=30)), range(ranks)
            )
        )


async def carry(
    transport: WeightTransport, receiver: Receiver, source: WeightSource
) -> tuple[Sequence[WeightChunk], list[Tensors]]:
    """Return the tensors that arrive, chunk by chunk; the messages pass as JSON."""
    chunks = await transport.open(source)
    (init,) = await transport.form([1])
    await asyncio.gather(asyncio.to_thread(receiver.join, as_json(init)), transport.meet())
    arrived = []
    for index in range(len(chunks)):
        update = as_json(await transport.load(index))
        received, _ = await asyncio.gather(asyncio.to_thread(receiver.receive, update), transport.send())
        arrived.append({name: tensor.clone() for name, tensor in received.items()})
    await transport.close()
    await transport.leave()
    return chunks, arrived


def ends(name: str, limit: int, senders: ThreadSenders | None = None) -> tuple[WeightTransport, Receiver]:
    """Return both ends of a transport. `senders`: of the ranks, two by default."""
    senders = senders or ThreadSenders(2)
    if name == "shared_memory":
        return SharedMemoryTransport(limit), Mapped()
    if name == "gloo":
        return GlooTransport(senders, limit), Gloo()
    if name == "torch_gloo":
        return TorchGlooTransport(senders, limit), TorchGroup()
    if name == "nccl":
        wire: Queue[Tensor] = Queue()
        transport = NcclTransport(senders, limit)
        transport.factory = lambda rank: NcclOnCpu(rank, wire)
        return transport, Nccl(wire)
    return CudaIpcTransport(_IpcOnCpu(senders), limit), Ipc(senders)


def as_json(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = orjson.loads(orjson.dumps(dict(message)))
    return plain


class Mapped:
    def join(self, init: dict[str, Any]) -> None:
        assert StagedInit(**init).transport == "shared_memory"
        self._files = MappedFiles()

    def receive(self, update: dict[str, Any]) -> Tensors:
        return {name: get() for name, get in self._files.receive(StagedUpdate(**update)).items()}


class Gloo:
    def join(self, init: dict[str, Any]) -> None:
        info = StagedInit(**init)
        assert info.transport == "gloo"
        self._group = GlooReceiver(info.meeting, info.rank_offset, info.world_size)

    def receive(self, update: dict[str, Any]) -> Tensors:
        return {name: get() for name, get in self._group.receive(StagedUpdate(**update)).items()}


class TorchGroup:
    """A member as SGLang makes one (sglang.srt.utils.init_custom_process_group), which unpacks as it does."""

    def join(self, init: dict[str, Any]) -> None:
        name, rank = GROUP, init["rank_offset"]
        for former in [group for group, known in _world.pg_names.items() if known == name]:
            destroy_process_group(former)
        url = f"tcp://{init['master_address']}:{init['master_port']}"
        store, rank, world = next(rendezvous(url, rank, init["world_size"], timeout=MEMBER_S))
        with closing_new_listeners():  # else the sender, of the same process, closes this one's too early
            self._group, _ = _new_process_group_helper(
                world,
                rank,
                [],
                Backend(init["backend"]),
                PrefixStore(name, store),
                group_name=GroupName(name),
                timeout=MEMBER_S,
            )
        _world.pg_group_ranks[self._group] = {each: each for each in range(world)}

    def receive(self, update: dict[str, Any]) -> Tensors:
        assert update["load_format"] == "flattened_bucket"
        assert update["flush_cache"] is False
        dtypes = [getattr(torch, name) for name in update["dtypes"]]
        described = list(zip(update["names"], update["shapes"], dtypes, strict=True))
        sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in described]
        packed = torch.empty(sum(sizes), dtype=torch.uint8)
        self._group.broadcast(packed, 0).wait()
        parts = zip(described, packed.split(sizes), strict=True)
        return {name: part.view(dtype).reshape(shape) for (name, shape, dtype), part in parts}


# NCCL: our sender and vLLM's own consumer, on either end of a queue instead of NCCL.


class NcclOnCpu(NcclSender):
    device = "cpu"

    def __init__(self, rank: int, wire: Queue[Tensor]) -> None:
        super().__init__(rank)
        self._wire = wire

    def prepare(self) -> str:
        return base64.b64encode(bytes(range(128))).decode()

    def meet(self, place: str, world: int) -> None:
        assert (len(base64.b64decode(place)), world) == (128, 2)

    def broadcast(self, packed: Tensor) -> None:
        self._wire.put(packed.clone())


class Nccl:
    def __init__(self, wire: Queue[Tensor]) -> None:
        self._wire = wire

    def join(self, init: dict[str, Any]) -> None:
        self._init = NCCLWeightTransferInitInfo(**init)
        assert self._init.packed
        assert self._init.nccl_unique_id_bytes == bytes(range(128))

    def receive(self, update: dict[str, Any]) -> Tensors:
        info = NCCLWeightTransferUpdateInfo(**update)
        described = zip(info.names, info.shapes, info.dtype_names, strict=True)
        arrived: Tensors = {}
        with _no_streams():
            packed_tensor.packed_nccl_broadcast_consumer(
                iterator=iter([(n, (shape, getattr(torch, dtype))) for n, shape, dtype in described]),
                group=self,
                src=0,
                post_unpack_func=arrived.update,
                buffer_size_bytes=self._init.packed_buffer_size_bytes,
                num_buffers=self._init.packed_num_buffers,
                device="cpu",
            )
        return arrived

    def broadcast(self, buffer: Tensor, src: int) -> None:
        sent = self._wire.get()
        assert sent.shape == buffer.shape, "both sides cut alike"
        buffer.copy_(sent)


class _NoStream:
    def synchronize(self) -> None:
        pass


def _no_streams() -> AbstractContextManager[Any]:
    return patch.multiple(
        packed_tensor, _get_streams=lambda device, count: (_NoStream(),) * count, torch=_TorchWithoutGpu()
    )


class _TorchWithoutGpu:
    """torch, where there is no GPU to make streams on."""

    class accelerator:  # noqa: N801
        current_device_index = staticmethod(lambda: 0)

    class cuda:  # noqa: N801
        stream = staticmethod(lambda stream: nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


# IPC: every rank's buffer is host memory; a handle is the id of its GPU.


class _IpcOnCpu:
    def __init__(self, ranks: ThreadSenders) -> None:
        self._ranks = ranks
        self.sender_call, self.root_call = ranks.sender_call, ranks.root_call

    @property
    def restarts(self) -> int:
        return self._ranks.restarts

    async def open_sender(self, factory: Any) -> None:
        assert factory.func is CudaIpcSender
        await self._ranks.open_sender(CudaIpcOnCpu)


class CudaIpcOnCpu(CudaIpcSender):
    device = "cpu"

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._rank = rank

    @property
    def memory(self) -> Tensor:
        assert self._loaded is not None
        return self._loaded

    def _open(self, source: ChunkSource) -> tuple[Sequence[WeightChunk], bytes]:
        return self._buffered(source).chunks, pickle.dumps((GPUS[self._rank], (self._rank, "handle")))

    def close(self) -> None:
        ChunkSender.close(self)


class Ipc:
    """A worker on the last rank's GPU, which reads as vLLM's packed consumer does."""

    def __init__(self, ranks: ThreadSenders) -> None:
        self._ranks = ranks

    def join(self, init: dict[str, Any]) -> None:
        assert IPCWeightTransferInitInfo(**init).packed

    def receive(self, update: dict[str, Any]) -> Tensors:
        with patch.dict("os.environ", VLLM_ALLOW_INSECURE_SERIALIZATION="1"):
            info = IPCWeightTransferUpdateInfo(**update)
        assert isinstance(info.ipc_handles, dict)
        assert info.tensor_sizes is not None
        gpus = GPUS[: len(self._ranks.senders)]
        assert set(info.ipc_handles) == set(gpus)
        rank, _ = info.ipc_handles[gpus[-1]]
        memory = self._ranks.senders[rank].memory[: sum(info.tensor_sizes)]
        dtypes = [getattr(torch, name) for name in info.dtype_names]
        return dict(packed_tensor.unpack_tensor(memory, info.names, info.shapes, dtypes, info.tensor_sizes))


def size_of(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
