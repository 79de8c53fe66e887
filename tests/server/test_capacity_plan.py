"""A plan fits what it says, in the simplest way there is."""

import re
from dataclasses import replace

import pytest

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.memory_costs import MemoryCosts, RowMemory
from skyrl_tinker.domain.units import GB
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import StartupError
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess
from skyrl_tinker.server.capacity_plan import CapacityPlan, make_plan
from skyrl_tinker.server.memory_estimate import SAMPLER, TRAINER, Demand

FACTS = BaseModelFacts(
    "/m", ("m",), "Qwen3ForCausalLM", 151936, 32768, 36, 8, 128, 4096, False, (), num_heads=32
)
DEMAND = Demand(
    gpus=1,
    gpu_bytes=80 * GB,
    context=32768,
    rank=32,
    tenants=1,
    chunk_bytes=0,
    adapter_slots=8,
    sampler_share=0.85,
)


def costs(ranks: int, scale: int = 1) -> MemoryCosts:
    """About those of Qwen3-8B, or of a larger one, with an adapter of rank 32."""
    parameters = 8 * GB * scale
    return MemoryCosts(
        parameters,
        100_000_000,
        2 * parameters // ranks,
        1_600_000_000,
        RowMemory(3 * GB, 6_800_000, 32768),
        RowMemory(3 * GB, 540_000, 32768),
        RowMemory(0, 180_000, 32768),
        36,
    )


def full_costs(ranks: int) -> MemoryCosts:
    parameters = 8 * GB
    return replace(costs(ranks), trained=parameters, state=16 * parameters // ranks)


def settings_of(plan: CapacityPlan) -> dict[str, object]:
    return {choice.setting: choice.value for choice in plan.choices}


def test_layers_are_recomputed_only_where_the_longest_sequence_needs_it() -> None:
    long, short = (make_plan(replace(DEMAND, context=length), FACTS, costs) for length in (32768, 4096))
    for plan, counted in ((long, "29 of 36 layers recomputed"), (short, "all activations kept")):
        (row,) = (line.name for line in plan.lines if line.name.startswith("row of") and line.counted)
        assert row.endswith(counted)
        assert settings_of(plan)["token_budget"] == 4096  # rows that fit without
        assert plan.problem is None


def test_rows_are_large_and_recomputed_where_only_tiny_ones_fit_otherwise() -> None:
    crowded = make_plan(replace(DEMAND, gpu_bytes=44 * GB, context=4096), FACTS, costs)
    tight = make_plan(replace(DEMAND, gpu_bytes=36 * GB, context=4096), FACTS, costs)
    assert [settings_of(plan)["token_budget"] for plan in (crowded, tight)] == [2048, 16384]


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_what_fits_is_within_the_gpus_memory(gpus: int) -> None:
    for tenants in (1, 8, 64):
        plan = make_plan(replace(DEMAND, gpus=gpus, tenants=tenants), FACTS, costs)
        assert plan.problem is None
        for place in (TRAINER, SAMPLER):
            lines = [line.bytes for line in plan.lines if line.place == place and line.counted]
            assert min(lines) >= 0
            assert sum(lines) <= DEMAND.gpu_bytes
        trainer = [line.bytes for line in plan.lines if line.place == TRAINER and line.counted]
        assert sum(trainer) > 20 * GB


def test_models_wait_on_the_host_when_the_gpu_holds_no_more() -> None:
    few, many = (make_plan(replace(DEMAND, tenants=tenants), FACTS, costs) for tenants in (4, 64))
    resident = settings_of(many)["resident_models"]
    assert 4 < resident < 64
    assert settings_of(few)["resident_models"] == resident
    assert any(line.name.startswith(f"{64 - resident} models off the GPU") for line in many.lines)


def test_trainer_and_samplers_share_gpus_only_if_they_must() -> None:
    assert settings_of(make_plan(replace(DEMAND, gpus=2), FACTS, costs))["placement"] == "separate"
    assert settings_of(make_plan(DEMAND, FACTS, costs))["placement"] == "colocated"
    full = make_plan(replace(DEMAND, gpus=4, rank=0), FACTS, full_costs)
    assert (settings_of(full)["placement"], settings_of(full)["trainer_ranks"]) == ("colocated", 4)
    assert settings_of(full)["max_lora_rank"] == 0, "nothing is counted for adapters"
    assert full.problem is None


def test_what_does_not_fit_is_refused_with_the_length_that_would() -> None:
    plan = make_plan(replace(DEMAND, gpu_bytes=28 * GB), FACTS, costs)
    assert plan.problem is not None
    assert f"at most {plan.longest} tokens do" in plan.problem
    assert 0 < plan.longest < DEMAND.context
    shorter, longer = (
        make_plan(replace(DEMAND, gpu_bytes=28 * GB, context=plan.longest + more), FACTS, costs)
        for more in (0, 1)
    )
    assert shorter.problem is None
    assert longer.problem is not None
    assert (
        f"expected a context_length of at most {plan.longest} or a smaller max_lora_rank or" in plan.problem
    )


def test_what_leaves_no_room_for_any_row_is_refused_with_what_would_help() -> None:
    plan = make_plan(replace(DEMAND, gpus=2, gpu_bytes=70 * GB, rank=0), FACTS, full_costs)
    assert plan.problem is not None
    assert plan.problem.endswith("no row does; expected a max_lora_rank over 0 or more or larger GPUs")
    assert "token_budget" not in settings_of(plan), "none of no tokens is proposed"
    huge = make_plan(DEMAND, FACTS, lambda ranks: costs(ranks, scale=10))
    assert huge.problem is not None


def test_replicas_get_the_gpus_that_their_weights_need() -> None:
    plan = make_plan(replace(DEMAND, gpus=8), FACTS, lambda ranks: costs(ranks, scale=4))
    chosen = settings_of(plan)
    assert chosen["replicas"] * chosen["tensor_parallel_size"] + chosen["trainer_ranks"] == 8
    assert chosen["tensor_parallel_size"] == 2  # 64 GB of weights, half of 68 GB on each GPU


def test_what_is_given_is_kept_and_all_gpus_are_used_where_it_leaves_the_choice() -> None:
    for given, gpus, expected in (
        ({"trainer_ranks": 2}, 8, (2, 6)),
        ({"replicas": 1}, 8, (4, 4)),
        ({"replicas": 3}, 8, (5, 3)),
        ({"tensor_parallel_size": 4}, 6, (2, 4)),
        ({"placement": "colocated"}, 8, (8, 8)),
        ({"placement": "colocated", "tensor_parallel_size": 2}, 7, (6, 6)),
        ({"trainer_ranks": 1, "replicas": 1, "tensor_parallel_size": 1}, 8, (1, 1)),
    ):
        plan = make_plan(replace(DEMAND, gpus=gpus, given=given), FACTS, costs)
        chosen = settings_of(plan)
        assert plan.problem is None
        assert given.items() <= chosen.items()
        assert {each.reason for each in plan.choices if each.setting in given} == {"as given"}
        samplers = chosen["replicas"] * chosen["tensor_parallel_size"]
        assert (chosen["trainer_ranks"], samplers) == expected, given


def test_a_replica_takes_the_gpus_of_its_other_parallelism_too() -> None:
    chosen = settings_of(make_plan(replace(DEMAND, gpus=8, copies=2), FACTS, costs))
    assert (chosen["trainer_ranks"], chosen["replicas"], chosen["tensor_parallel_size"]) == (4, 2, 1)


def test_rows_and_models_that_are_given_must_fit() -> None:
    crowded = replace(DEMAND, gpu_bytes=36 * GB, context=4096)
    for given, names in (
        ({"token_budget": 32768}, "a row of 32768 tokens .* with recomputed layers"),
        ({"gradient_checkpointing": False}, "a row of 4096 tokens .* without recomputed layers"),
        ({"resident_models": 12}, "with 12 models in training"),
    ):
        plan = make_plan(replace(crowded, given=given), FACTS, costs)
        assert plan.problem is not None
        assert re.search(names, plan.problem)
        assert plan.place == TRAINER
    small = make_plan(replace(DEMAND, sampler_share=0.25), FACTS, costs)
    assert (small.problem is not None, small.place) == (True, SAMPLER)


def test_new_weights_must_fit_beside_vllm_as_they_arrive() -> None:
    full = replace(DEMAND, gpus=8, rank=0, context=4096)
    roomy, tight = (
        make_plan(replace(full, sampler_share=share), FACTS, full_costs) for share in (0.85, 0.96)
    )
    assert (roomy.problem, tight.place) == (None, SAMPLER)
    assert re.search(
        r"new weights take 3\.7 GB .* leaves 1\.7 GB: set a smaller gpu_mem", tight.problem or ""
    )
    (line,) = (line for line in roomy.lines if line.name.startswith("new weights"))
    assert line.bytes == 3 * 2 * FACTS.vocab_size * FACTS.hidden_size
    chunked = make_plan(replace(full, chunk_bytes=2 * GB), FACTS, full_costs)
    assert [line.bytes for line in chunked.lines if "arrive" in line.name] == [6 * GB]
    mixture = replace(FACTS, hidden_size=2048, intermediate_size=768, experts=128, experts_per_token=8)
    experts = make_plan(full, mixture, full_costs)  # of a layer, which are one to vLLM
    assert [line.bytes for line in experts.lines if "arrive" in line.name] == [3 * 2 * 128 * 3 * 2048 * 768]
    adapters = make_plan(replace(DEMAND, sampler_share=0.85), FACTS, costs)
    assert not any("arrive" in line.name for line in adapters.lines)


def test_layers_that_are_always_recomputed_allow_longer_rows() -> None:
    chosen = settings_of(make_plan(replace(DEMAND, given={"gradient_checkpointing": True}), FACTS, costs))
    assert chosen["token_budget"] == 16384


def test_slots_of_experts_have_a_part_of_the_rank_and_adapters_wait_on_the_host() -> None:
    """Adapters divide 32 by the 8 of 128 experts that are chosen; vLLM's slots have rank 8 at least."""
    mixture = replace(FACTS, hidden_size=2048, intermediate_size=768, experts=128, experts_per_token=8)
    expert_rank = VllmProcess().expert_slot_rank(DEMAND.rank, mixture.experts_per_token)
    demand = replace(DEMAND, gpu_bytes=141 * GB, cached_adapters=32, expert_rank=expert_rank)
    lines = {line.name: line.bytes for line in make_plan(demand, mixture, costs).lines}
    unused = 36 * 128 * (8 - 4) * 3 * (2048 + 768)
    assert lines["slots of 8 adapters"] == 8 * 2 * (100_000_000 + unused)
    assert lines["32 adapters in each process of the samplers, at most"] == 32 * 2 * 100_000_000


def test_models_that_stay_leave_room_for_a_row() -> None:
    demand = replace(DEMAND, context=4096)
    resident = settings_of(make_plan(demand, FACTS, costs))["resident_models"]
    for more, fits in ((0, True), (1, False)):
        plan = make_plan(replace(demand, given={"resident_models": resident + more}), FACTS, costs)
        assert (plan.problem is None) is fits


@pytest.mark.parametrize(
    ("gpus", "given", "message"),
    [
        (0, {}, r"needs 2 GPUs \(1 .*, 1 for samplers\), found 0; 1 would do if both share them"),
        (3, {"trainer_ranks": 3, "replicas": 2}, r"needs 5 GPUs \(3 .*, 2 for samplers\), found 3$"),
        (1, {"placement": "separate"}, r"needs 2 GPUs \(1 for trainer ranks, 1 for samplers\), found 1$"),
        (
            1,
            {"placement": "colocated", "replicas": 2},
            "needs 2 GPUs that trainer ranks and samplers share, found 1",
        ),
        (
            8,
            {"placement": "colocated", "trainer_ranks": 3, "replicas": 2},
            "no number of GPUs agrees with placement colocated, trainer_ranks 3, replicas 2: ",
        ),
    ],
)
def test_gpus_that_are_too_few_are_refused_with_how_many_it_takes(
    gpus: int, given: dict[str, object], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        make_plan(replace(DEMAND, gpus=gpus, given=given), FACTS, costs)


def test_every_choice_is_a_setting() -> None:
    for demand in (DEMAND, replace(DEMAND, gpus=8, tenants=100)):
        chosen = settings_of(make_plan(demand, FACTS, costs))
        assert Settings(**chosen).trainer_ranks == chosen["trainer_ranks"]
