"""Memory that the processes of a base model take on CPUs, estimated before they start. No torch, no Ray."""

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.state_size import base_bytes
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.inference.sampling_engine import engine_of
from skyrl_tinker.inference.servers.sampler_memory import PROCESS_BYTES, needed_bytes, slot_bytes

RANK_BYTES = 768 * MiB
"""Of a rank's process on a CPU, beside the base model's weights.

Measured with a tiny model, as PSS in MB: 370 of an idle rank, 770 of one that had trained the many models of
the tests in tests/e2e for 12 minutes.
"""


def base_memory(settings: Settings, facts: BaseModelFacts | None, *, trained: bool) -> int:
    """Estimate the bytes of a base model's processes on CPUs; 0 where they may be on other hosts.

    `settings`: of this base model. `facts` None: of processes alone, without weights and KV caches. Weights
    count twice on the ranks: 470 MB made an idle rank larger by 570, and training needs more.
    """
    if settings.ray_address is not None:
        return 0
    replicas = 0 if settings.external_urls else settings.replicas
    ranks = settings.trainer_ranks if trained else 0
    parallel, dtype = settings.tensor_parallel_size, settings.trainer_dtype
    workers = engine_of(settings).workers(parallel)
    if facts is None:
        return replicas * workers * PROCESS_BYTES + ranks * RANK_BYTES
    weights = 2 * base_bytes(facts, dtype) if ranks else 0
    slots = slot_bytes(facts, dtype, settings.max_loras, settings.max_lora_rank)
    sampler = sum(needed_bytes(facts, dtype, workers, parallel, slots))
    return replicas * sampler + ranks * RANK_BYTES + weights
