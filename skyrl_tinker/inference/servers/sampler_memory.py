"""Memory of replicas on a CPU."""

from pathlib import Path

from skyrl_tinker.domain.units import MiB
from skyrl_tinker.domain.weight_files import weight_files
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.servers.replica_spec import SamplerSpec
from skyrl_tinker.system.host_memory import host_memory

SMALLEST_KV_BYTES = 64 * MiB
KV_CONTEXTS = 4  # whole contexts that fit the KV cache at once
PROCESS_BYTES = 1536 * MiB  # of both processes, beside weights and KV cache; measured after hours
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def kv_bytes(spec: SamplerSpec) -> int:
    model = spec.model
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * ELEMENT_BYTES[spec.dtype]
    return max(SMALLEST_KV_BYTES, KV_CONTEXTS * spec.max_model_len * per_token)


def weight_bytes(directory: str) -> int:
    """Return the size of a model's files. Raises SamplerError where they are damaged or gone."""
    try:
        return sum(file.stat().st_size for file in weight_files(Path(directory)))
    except (OSError, ValueError) as error:
        raise SamplerError(str(error)) from error


def needed_bytes(spec: SamplerSpec) -> tuple[int, int, int]:
    """Return the memory of a replica on a CPU: its KV cache, weights and processes.

    Weights count twice: once as loaded, once as packed for the CPU's kernels. Raises SamplerError where their
    files are damaged or gone.
    """
    weights = weight_bytes(spec.model.directory)
    copies = spec.workers // spec.tensor_parallel_size
    return copies * kv_bytes(spec), copies * 2 * weights, PROCESS_BYTES * spec.workers


def require_memory(spec: SamplerSpec, replicas: int = 1, available: int | None = None) -> None:
    """Raise SamplerError with the numbers if CPU replicas do not fit `available` bytes (None: those free)."""
    free = host_memory().available if available is None else available
    kv_cache, loaded, processes = needed_bytes(spec)
    needed = replicas * (kv_cache + loaded + processes)
    if spec.device == "cpu" and needed > free:
        times = f"{replicas} times " if replicas > 1 else ""
        raise SamplerError(
            f"the sampler needs {needed // MiB} MiB ({times}{kv_cache // MiB} for the KV "
            f"cache of {KV_CONTEXTS} x {spec.max_model_len} tokens, {loaded // MiB} for weights, "
            f"{processes // MiB} for its processes) but {free // MiB} MiB are free: "
            "set a smaller context_length, fewer replicas or free memory"
        )
