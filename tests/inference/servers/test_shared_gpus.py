"""Colocated on CUDA: a replica sees the GPUs of its trainer ranks and can sleep. No GPU is used here."""

from dataclasses import replace

from skyrl_tinker.domain.values import BaseModelFacts, Gpu
from skyrl_tinker.inference.servers.replica_spec import SamplerSpec
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess, flags, visible_gpus

FACTS = BaseModelFacts("/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))
OWN = SamplerSpec(FACTS, "cuda", "bfloat16", 8, 1, 1, "/nowhere", 1.0, replicas=2, engine=VllmProcess())
RANKS = tuple(Gpu("node", str(index)) for index in (4, 5, 6, 7))
SHARED = replace(OWN, tensor_parallel_size=2, shared_gpus=RANKS)


def test_replicas_divide_the_ranks_gpus_in_order() -> None:
    assert [SHARED.gpus_of(replica) for replica in range(2)] == [RANKS[:2], RANKS[2:]]
    assert visible_gpus(SHARED, 1)["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_a_replica_on_gpus_of_its_own_sees_what_ray_gave_it_and_never_sleeps() -> None:
    assert visible_gpus(OWN, 1) == {}
    assert "--enable-sleep-mode" not in flags(OWN, 1)


def test_a_sharing_replica_can_sleep_and_takes_its_share_of_the_memory() -> None:
    given = flags(replace(SHARED, gpu_memory_utilization=0.7), 1)
    assert "--enable-sleep-mode" in given
    assert given[given.index("--gpu-memory-utilization") + 1] == "0.7"


def test_on_cpu_no_flag_of_gpus_is_given() -> None:
    given = flags(replace(OWN, device="cpu"), 1)
    assert not any("gpu" in flag or "sleep" in flag for flag in given)
