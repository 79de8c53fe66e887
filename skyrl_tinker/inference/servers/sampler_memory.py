"""Memory of replicas on a CPU."""

from skyrl_tinker.domain.state_size import ELEMENT_BYTES, base_bytes, cached_bytes, parameters
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.servers.replica_spec import SamplerSpec
from skyrl_tinker.system.host_memory import host_memory

SMALLEST_KV_BYTES = 64 * MiB
KV_CONTEXTS = 4  # whole contexts that fit the KV cache at once
PROCESS_BYTES = 1536 * MiB
"""Of a replica's processes for each worker, beside weights and KV cache.

Measured with a tiny model and the default engine, as PSS in MB: 68 of the actor, 412 of the API server, 410
of the engine's core when idle; at most 900 of a core in 10 minutes of tests. In hours it doubles, as oneDNN
keeps 1,024 primitives, by layer and size of the batch (`RSS_GROWTH` of scripts/bench/soak.py).
"""


def kv_bytes(model: BaseModelFacts, dtype: str) -> int:
    return max(SMALLEST_KV_BYTES, KV_CONTEXTS * (model.context_length + 1) * cached_bytes(model, dtype))


def slot_bytes(model: BaseModelFacts, dtype: str, max_loras: int, max_lora_rank: int) -> int:
    """Return the bytes of slots of adapters; rank 0: none."""
    adapter = parameters(model, LoraSpec(max_lora_rank, seed=0)) if max_lora_rank else 0
    return max_loras * adapter * ELEMENT_BYTES[dtype]


def needed_bytes(
    model: BaseModelFacts, dtype: str, workers: int, tensor_parallel_size: int, slots: int
) -> tuple[int, int, int]:
    """Return the memory of a replica on a CPU: its KV cache, weights with slots of adapters, and processes.

    Weights count a quarter more: the head is kept as loaded and as packed for the CPU's kernels. A model of
    470 MB in float32, whose slots are of 340, took 930 MB of them.
    """
    copies = workers // tensor_parallel_size
    weights = base_bytes(model, dtype) * 5 // 4 + slots
    return copies * kv_bytes(model, dtype), copies * weights, workers * PROCESS_BYTES


def require_memory(spec: SamplerSpec, replicas: int = 1, available: int | None = None) -> None:
    """Raise SamplerError with the numbers if CPU replicas do not fit `available` bytes (None: those free)."""
    free = host_memory().available if available is None else available
    slots = slot_bytes(spec.model, spec.dtype, spec.max_loras, spec.max_lora_rank)
    kv_cache, loaded, processes = needed_bytes(
        spec.model, spec.dtype, spec.workers, spec.tensor_parallel_size, slots
    )
    needed = replicas * (kv_cache + loaded + processes)
    if spec.device == "cpu" and needed > free:
        times = f"{replicas} times " if replicas > 1 else ""
        raise SamplerError(
            f"the sampler needs {needed // MiB} MiB ({times}{kv_cache // MiB} for the KV "
            f"cache of {KV_CONTEXTS} x {spec.max_model_len} tokens, {loaded // MiB} for weights, "
            f"{processes // MiB} for its processes) but {free // MiB} MiB are free: "
            "set a smaller context_length, fewer replicas or free memory"
        )
