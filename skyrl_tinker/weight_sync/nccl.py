"""Transport to samplers on separate GPUs: chunks are broadcast over NCCL to vLLM's `nccl` engine.

Not run on a GPU yet. Tested on CPU: messages, chunks and their bytes, against vLLM's own message types and
unpacking.
"""

import base64
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any

from skyrl_tinker.domain.values import Way
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.weight_sync.broadcast import BroadcastSender, BroadcastTransport
from skyrl_tinker.weight_sync.chunks import WeightChunk
from skyrl_tinker.weight_sync.transport import LOOPBACK, Message

if TYPE_CHECKING:
    import torch

NAME = "nccl"
TIMEOUT_S = 60.0
"""Limit for the members to meet, and for one chunk. NCCL itself waits indefinitely for a missing member."""


class NcclSender(BroadcastSender):
    """Sender that uses vLLM's communicator, so that both sides have the same NCCL."""

    device = "cuda"
    warms_up = True
    """Whether the communicator begins with a reduction, as that of vLLM's members does."""

    def __init__(self, rank: int, host: str = LOOPBACK) -> None:
        super().__init__(rank, host)
        # A separate stream: a broadcast and queued training do not wait for each other.
        self._stream: Any = None
        self._waiting: Future[Any] = Future()  # for a call of NCCL to end

    def prepare(self) -> str:
        """Return the base64 id by which the members find each other. No free port is needed."""
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self.leave()
        self._waiting = Future()
        unique = NCCLLibrary().ncclGetUniqueId()
        return base64.b64encode(bytes(unique.internal)).decode()

    def meet(self, address: str, world: int) -> None:
        import torch
        from vllm.distributed.device_communicators import pynccl
        from vllm.utils.nccl import unpinned_nccl_env

        device = torch.device("cuda", torch.cuda.current_device())
        self._stream = stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def join() -> Any:
            pynccl._warmup_tls.deferred = not self.warms_up  # thread-local
            with unpinned_nccl_env(), torch.cuda.stream(stream):
                return pynccl.PyNcclCommunicator.from_unique_id_bytes(
                    base64.b64decode(address), rank=0, world_size=world, device=device
                )

        self._group = self._in_time(join)

    def broadcast(self, packed: "torch.Tensor") -> None:
        import torch

        group, stream = self._group, self._stream
        assert group is not None, "meet() comes first"

        def send() -> None:
            with torch.cuda.device(packed.device):
                group.broadcast(packed, src=0, stream=stream)
                stream.synchronize()

        self._in_time(send)  # `leave` aborts one that timed out

    def leave(self) -> None:
        group, self._group = self._group, None
        _settle(self._waiting, SamplerError("the trainer left the group"))
        if group is not None:
            group.destroy()

    def _in_time(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, in a thread that is abandoned if NCCL never returns.

        Raises SamplerError after TIMEOUT_S, or on `leave`.
        """
        if self._waiting.done():
            self._waiting = Future()
        waiting = self._waiting

        def run() -> None:
            try:
                _settle(waiting, work())
            except BaseException as error:  # becomes the result for the thread that waits
                _settle(waiting, error)

        Thread(target=run, daemon=True, name="nccl").start()
        try:
            return waiting.result(TIMEOUT_S)
        except TimeoutError as error:
            if waiting.done():  # its own
                raise
            raise SamplerError(f"not all samplers took part in NCCL within {TIMEOUT_S:.0f} s") from error


class NcclTransport(BroadcastTransport):
    backend = "nccl"
    staged = False
    ways: tuple[Way, Way] = ("nccl", "nccl")
    sender = NcclSender

    def join_message(self, address: str, rank_offset: int, world: int) -> Message:
        # vLLM cuts an update behind the tensor that exceeds the buffer. Our chunks are within it or a single
        # tensor, so that an update is one broadcast on both sides.
        return {
            "nccl_unique_id_b64": address,
            "rank_offset": rank_offset,
            "world_size": world,
            "packed": True,
            "packed_buffer_size_bytes": self.limit,
            "packed_num_buffers": 1,
        }

    def update_message(self, chunk: WeightChunk, *, last: bool) -> Message:
        return {"names": chunk.names, "dtype_names": chunk.dtypes, "shapes": chunk.shapes}


def _settle(waiting: Future[Any], result: Any) -> None:
    with suppress(InvalidStateError):  # already done
        if isinstance(result, BaseException):
            waiting.set_exception(result)
        else:
            waiting.set_result(result)
