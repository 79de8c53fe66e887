"""Specification of a sampler replica, and the port for its engine's process."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from skyrl_tinker.domain.sampler_abilities import SamplerAbilities
from skyrl_tinker.domain.values import BaseModelFacts, Gpu
from skyrl_tinker.inference.constants import LONE_SEQUENCES, RESERVED_SEQUENCES

if TYPE_CHECKING:  # `serve` itself does without an HTTP client
    from skyrl_tinker.inference.client.sampling_port import Dialect

Arguments = Mapping[str, Any]
"""Name without leading dashes -> JSON value: true is a switch, a list several values, an object JSON."""


@dataclass(frozen=True, slots=True)
class ModelToServe:
    """Base model and the way to serve it. `config`: its config.json. `adapters`: whether any are served."""

    facts: BaseModelFacts
    config: Mapping[str, Any]
    device: str
    adapters: bool
    router_replay: bool
    tool_parser: str | None


class EngineProcess(Protocol):
    """Server process of a sampling engine. Frozen and picklable.

    `arguments`: those that users give. `title`: its name in messages and, in lower case, in file names.
    `leftovers`: path prefixes of shared memory that killed processes leave. `cores`: engine cores over which
    a replica spreads its requests. `torch_groups`: it takes full weights in groups of torch.distributed, not
    by its own weight transfer.
    """

    @property
    def arguments(self) -> Arguments: ...
    @property
    def title(self) -> str: ...
    @property
    def abilities(self) -> SamplerAbilities: ...
    @property
    def dialect(self) -> "Dialect": ...
    @property
    def leftovers(self) -> tuple[str, ...]: ...
    @property
    def torch_groups(self) -> bool: ...
    @property
    def cores(self) -> int: ...
    def check(self) -> None: ...
    def require_model(self, served: ModelToServe) -> None: ...
    def workers(self, tensor_parallel_size: int) -> int: ...
    def expert_slot_rank(self, rank: int, experts_per_token: int) -> int: ...
    def require_memory(self, spec: "SamplerSpec", replicas: int = 1) -> None: ...
    def command(self, spec: "SamplerSpec", port: int, host: str) -> list[str]: ...
    def environment(self, spec: "SamplerSpec", replica: int, interface: str) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class SamplerSpec:
    model: BaseModelFacts
    device: str  # "cpu" | "cuda"
    dtype: str
    max_lora_rank: int  # 0: no adapters
    max_loras: int  # adapters in one batch
    max_cpu_loras: int  # adapters kept in memory
    log_dir: str
    log_suffix: str = ""  # of the names of its logs, by which base models differ
    startup_s: float = 900.0  # time to start; an engine may give up by itself, after 600
    engine: EngineProcess = field(kw_only=True)
    replicas: int = 1
    tensor_parallel_size: int = 1  # of each replica
    hang_s: float = 10.0  # silence after which a replica counts as dead
    sampled_logprobs: Literal["raw", "processed"] = "raw"
    router_replay: bool = False  # answers list the experts of each token
    reasoning_parser: str | None = None  # of its chats
    tool_parser: str | None = None  # likewise
    weight_backend: str = "skyrl_staged"  # of its weight transfer: skyrl_staged, gloo, nccl or ipc
    keeps_cache: bool = False  # running requests keep keys and values of old weights
    gpu_memory_utilization: float = 0.85
    shared_gpus: tuple[Gpu, ...] = ()  # of the trainer's ranks, in the replicas' order; (): from Ray
    token: str = field(default="", repr=False)  # required in every request; empty: none
    network_interface: str | None = None  # for weights from the trainer; None: of the host's address

    @property
    def max_model_len(self) -> int:
        """The context + 1: scoring a full context costs one generated token."""
        return self.model.context_length + 1

    @property
    def most_sequences(self) -> int:
        """Number of sequences that a replica decodes at once: all that it may get, and the reserve."""
        return LONE_SEQUENCES[self.device] + RESERVED_SEQUENCES

    @property
    def workers(self) -> int:
        """Number of worker processes of a replica: its GPUs, unless it runs on a CPU."""
        return self.engine.workers(self.tensor_parallel_size)

    def gpus_of(self, replica: int) -> tuple[Gpu, ...]:
        """Return the shared GPUs that the replica runs on."""
        size = self.workers
        return self.shared_gpus[replica * size : (replica + 1) * size]


def as_flags(arguments: Arguments) -> list[str]:
    return [part for name, value in arguments.items() for part in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"]
    values = value if isinstance(value, list) else [value]
    return [f"--{name}", *(json.dumps(each) if isinstance(each, dict) else str(each) for each in values)]
