"""Choice of a server's transport by its setting, its device and the placement of trainer and samplers."""

from typing import Literal

from skyrl_tinker.domain.units import MiB
from skyrl_tinker.errors import StartupError
from skyrl_tinker.weight_sync.cuda_ipc import CudaIpcTransport
from skyrl_tinker.weight_sync.gloo import GlooTransport
from skyrl_tinker.weight_sync.nccl import NcclTransport
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_tinker.weight_sync.torch_groups import TorchGlooTransport, TorchNcclTransport
from skyrl_tinker.weight_sync.transport import LOOPBACK, Senders, SenderTransport, WeightTransport

Setting = Literal["auto", "shared_memory", "gloo", "nccl", "cuda_ipc"]
TransportName = Literal["shared_memory", "gloo", "nccl", "cuda_ipc", "torch_gloo", "torch_nccl"]
Device = Literal["cpu", "cuda"]
CHUNK_BYTES = 256 * MiB
"""Weights that are sent at once: of two, of which the next one is read meanwhile, each sender has room."""
_TORCH: dict[Device, tuple[Setting, TransportName]] = {
    "cpu": ("gloo", "torch_gloo"),
    "cuda": ("nccl", "torch_nccl"),
}

_SENDING: dict[TransportName, type[SenderTransport]] = {
    "gloo": GlooTransport,
    "nccl": NcclTransport,
    "cuda_ipc": CudaIpcTransport,
    "torch_gloo": TorchGlooTransport,
    "torch_nccl": TorchNcclTransport,
}
TRANSPORTS: dict[TransportName, type[WeightTransport]] = {"shared_memory": SharedMemoryTransport, **_SENDING}


def choose(setting: Setting, device: Device, *, colocated: bool, torch_groups: bool = False) -> TransportName:
    """Return the transport to use. Raises StartupError when the setting does not fit.

    `torch_groups`: samplers take weights in groups of torch.distributed.
    """
    if torch_groups:
        way, name = _TORCH[device]
        if setting not in ("auto", way):
            raise StartupError(
                f"weight_transport {setting} does not fit device {device} with this sampler_engine: set {way}"
            )
        return name
    if device == "cpu":
        if setting == "auto":
            return "shared_memory"
        if setting not in ("shared_memory", "gloo"):
            raise StartupError(f"weight_transport {setting} needs device cuda: set shared_memory or gloo")
        return setting
    fitting: TransportName = "cuda_ipc" if colocated else "nccl"
    if setting not in ("auto", fitting):
        placement = "colocated" if colocated else "separate"
        raise StartupError(
            f"weight_transport {setting} does not fit device cuda with placement {placement}: set {fitting}"
        )
    return fitting


def make_transport(
    name: TransportName, senders: Senders, chunk_bytes: int, host: str = LOOPBACK
) -> WeightTransport:
    """`host`: address of rank 0's host for samplers on others, loopback where there are none."""
    if name == "shared_memory":
        return SharedMemoryTransport(chunk_bytes)
    return _SENDING[name](senders, chunk_bytes, host)
