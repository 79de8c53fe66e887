"""Choice of a server's transport by its setting, its device and the placement of trainer and samplers."""

from typing import Literal

from skyrl_tinker.errors import StartupError
from skyrl_tinker.weight_sync.cuda_ipc import CudaIpcTransport
from skyrl_tinker.weight_sync.gloo import LOOPBACK, GlooTransport
from skyrl_tinker.weight_sync.nccl import NcclTransport
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_tinker.weight_sync.transport import Senders, WeightTransport

Setting = Literal["auto", "shared_memory", "gloo", "nccl", "cuda_ipc"]
TransportName = Literal["shared_memory", "gloo", "nccl", "cuda_ipc"]
Device = Literal["cpu", "cuda"]

_BACKENDS: dict[TransportName, str] = {
    "shared_memory": SharedMemoryTransport.backend,
    "gloo": GlooTransport.backend,
    "nccl": NcclTransport.backend,
    "cuda_ipc": CudaIpcTransport.backend,
}
_CPU: tuple[TransportName, ...] = ("shared_memory", "gloo")


def choose(setting: Setting, device: Device, *, colocated: bool) -> TransportName:
    """Return the transport to use. StartupError when the setting does not fit."""
    if device == "cpu":
        chosen: TransportName = "shared_memory" if setting == "auto" else setting
        if chosen not in _CPU:
            raise StartupError(f"weight_transport {chosen} needs device cuda: set shared_memory or gloo")
        return chosen
    fitting: TransportName = "cuda_ipc" if colocated else "nccl"
    if setting not in ("auto", fitting):
        placement = "colocated" if colocated else "separate"
        raise StartupError(
            f"weight_transport {setting} does not fit device cuda with placement {placement}: set {fitting}"
        )
    return fitting


def backend_of(name: TransportName) -> str:
    """Return the backend that vLLM's --weight-transfer-config must name."""
    return _BACKENDS[name]


def make_transport(
    name: TransportName, senders: Senders, chunk_bytes: int, host: str = LOOPBACK
) -> WeightTransport:
    """`host`: address of rank 0's host for samplers on others, loopback where there are none."""
    if name == "shared_memory":
        return SharedMemoryTransport(chunk_bytes)
    if name == "gloo":
        return GlooTransport(senders, chunk_bytes, host)
    if name == "nccl":
        return NcclTransport(senders, chunk_bytes)
    return CudaIpcTransport(senders, chunk_bytes)
