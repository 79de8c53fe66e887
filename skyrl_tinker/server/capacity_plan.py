"""Plan of a server on given GPUs: whether it fits, the settings that follow, and why. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_tinker.domain.memory_costs import MemoryCosts
from skyrl_tinker.domain.units import GB
from skyrl_tinker.domain.values import BaseModelFacts, Way
from skyrl_tinker.server.gpu_division import divide
from skyrl_tinker.server.memory_estimate import SAMPLER, TRAINER, Demand, MemoryEstimate, MemoryLine
from skyrl_tinker.weight_sync.factory import TRANSPORTS, choose

MOST_TOKENS = 16384
"""Largest useful row: the weights' gathering and the launches vanish beside it."""
LEAST_TOKENS = 2048
"""Smallest useful row: below it, recomputing the layers of larger rows costs less than gathering weights."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting of `serve`."""

    setting: str
    value: Any
    reason: str

    def __str__(self) -> str:
        option = f"--{self.setting.replace('_', '-')} {self.value}"
        return f"{option:<52}{self.reason}".rstrip()


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Result: the settings, and the memory that they ask for."""

    problem: str | None  # None: it fits
    place: str | None  # whose memory is too small
    lines: tuple[MemoryLine, ...]
    choices: tuple[Choice, ...]
    longest: int  # tokens of the longest row that would fit, of those that were measured
    room: float  # bytes of a trainer's GPU that models and rows may take
    weights_by: Way  # of full parameters to the samplers

    @property
    def settings(self) -> dict[str, Any]:
        return {choice.setting: choice.value for choice in self.choices}


def make_plan(demand: Demand, facts: BaseModelFacts, costs_of: Callable[[int], MemoryCosts]) -> CapacityPlan:
    """Plan with trainer and samplers apart, else, if that does not fit, with both on all GPUs in turns.

    `costs_of`: costs for a number of ranks. Raises StartupError when the GPUs are too few for the settings.
    """
    sizes = [1 << power for power in range(7) if facts.num_kv_heads % (1 << power) == 0]
    for ways in divide(demand.gpus, demand.given, sizes, demand.copies):
        costs = costs_of(ways[0].ranks)
        by_size = sorted(ways, key=lambda way: way.tensor_parallel)
        plan = _plan([MemoryEstimate(demand, facts, way, costs) for way in by_size])
        if plan.problem is None:
            break
    return plan


def _plan(estimates: Sequence[MemoryEstimate]) -> CapacityPlan:
    """Plan with the fewest GPUs per replica that leave half of them to the cache, else with the most."""
    estimate = next((each for each in estimates if each.half_cached), estimates[-1])
    longest = estimate.small.tokens_within(estimate.row_room())
    problem, place = _problem(estimate, longest)
    weights_by, _ = TRANSPORTS[choose("auto", "cuda", colocated=estimate.division.colocated)].ways
    return CapacityPlan(
        problem, place, estimate.lines(), _choices(estimate), longest, estimate.room, weights_by
    )


def _problem(estimate: MemoryEstimate, longest: int) -> tuple[str | None, str | None]:
    demand = estimate.demand
    if longest < demand.longest_row:
        without = "" if estimate.small is estimate.costs.recomputed else "out"
        fits = f"at most {longest} tokens do" if longest else "no row does"
        models = f" with {estimate.resident} models in training" if estimate.resident > 1 else ""
        problem = (
            f"a row of {demand.longest_row} tokens does not fit into {estimate.room / GB:.1f} of "
            f"{demand.gpu_bytes / GB:g} GB beside {estimate.state_bytes / GB:.1f} GB of weights, gradients "
            f"and moments, with{without} recomputed layers: {fits}{models}; expected "
            f"{_remedies(estimate, longest)}"
        )
        return problem, TRAINER
    refused = sampler_problem(estimate)
    return refused, SAMPLER if refused else None


def _remedies(estimate: MemoryEstimate, longest: int) -> str:
    """Name the changes that may make the longest row fit, the smallest first."""
    demand, found = estimate.demand, list[str]()
    if estimate.small is not estimate.costs.recomputed:
        found.append("gradient_checkpointing on")
    if longest:
        name = "token_budget" if demand.context <= longest else "context_length"
        found.append(f"a {name} of at most {longest}")
    if "resident_models" in demand.given:
        found.append("a smaller resident_models")
    if demand.full and demand.tenants > 1:
        found.append("fewer models in training")
    if estimate.costs.weights < estimate.room:
        found.append("a max_lora_rank over 0" if demand.full else "a smaller max_lora_rank")
    return " or ".join((*found, "more or larger GPUs"))


def sampler_problem(estimate: MemoryEstimate) -> str | None:
    """Return why a sampler does not fit on its GPUs, None if it does."""
    demand = estimate.demand
    if not estimate.division.replicas:
        return None
    if estimate.cache_tokens < demand.context:
        tokens = max(0, int(estimate.cache_tokens))
        return (
            f"the samplers have room for {tokens} tokens, not for a sequence of {demand.context}; set a "
            "larger tensor_parallel_size or gpu_memory_utilization, or a smaller context_length"
            f"{'' if demand.full else ', max_loras or max_lora_rank'}"
        )
    if estimate.arriving > estimate.beside_sampler:
        return (
            f"new weights take {estimate.arriving / GB:.1f} GB of a sampler's GPU as they arrive, and it "
            f"leaves {estimate.beside_sampler / GB:.1f} GB: set a smaller gpu_memory_utilization"
        )
    return None


def _choices(estimate: MemoryEstimate) -> tuple[Choice, ...]:
    demand, division, costs = estimate.demand, estimate.division, estimate.costs
    fast, small = (rows.tokens_within(estimate.row_room()) for rows in (estimate.fast, estimate.small))
    budget = min(MOST_TOKENS, _power_of_two(fast if fast >= LEAST_TOKENS else small))
    longest = max(demand.longest_row, demand.given.get("token_budget", budget))
    choices = [
        Choice("device", "cuda", ""),
        Choice("trainer_dtype", "bfloat16", "half the memory of float32, and the attention kernels need it"),
        Choice(
            "placement",
            division.placement,
            "trainer and samplers take turns on the same GPUs"
            if division.colocated
            else "neither waits for the other",
        ),
        Choice("trainer_ranks", division.ranks, f"{costs.weights / GB:.1f} GB of the base on each"),
        *_sampler_choices(estimate),
        Choice("context_length", demand.context, "by default the model's, at most 4096"),
        *([Choice("token_budget", budget, _why(fast, small))] if small else []),
    ]
    reserved = "nothing for adapters" if demand.full else "memory for adapters of this rank"
    why = f"samplers reserve {reserved}" if division.replicas else "the default"
    choices.append(Choice("max_lora_rank", demand.rank, why))
    if not demand.full:
        beside = f"no more fit beside a row of {longest} tokens"
        choices.append(Choice("resident_models", estimate.models_beside(longest), beside))
    return tuple(
        Choice(each.setting, demand.given[each.setting], "as given") if each.setting in demand.given else each
        for each in choices
    )


def _sampler_choices(estimate: MemoryEstimate) -> Iterator[Choice]:
    division = estimate.division
    if division.replicas:
        fewest = "the fewest GPUs that leave half of them to keys and values"
        yield Choice("tensor_parallel_size", division.tensor_parallel, fewest)
        cached = f"keys and values of {estimate.cache_tokens:,.0f} tokens in each"
        yield Choice("replicas", division.replicas, cached)
    else:
        yield Choice("replicas", 0, "")


def _why(fast: int, small: int) -> str:
    if fast == small:  # by gradient_checkpointing, or because all fits
        return f"rows of up to {fast:,} tokens fit"
    return (
        f"rows of up to {fast:,} tokens keep all activations; of longer ones, up to {small:,}, as many "
        "layers as need be are recomputed"
    )


def _power_of_two(most: int) -> int:
    return 1 << max(0, most.bit_length() - 1)
