"""Plan of a server on given GPUs: what fits, which settings follow, and why. Imports no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from skyrl_tinker.domain.memory_costs import MemoryCosts
from skyrl_tinker.domain.units import GB, MiB
from skyrl_tinker.domain.values import BaseModelFacts

CONTEXT_BYTES = 1.5 * GB
"""CUDA's context, libraries and their workspaces, in each process that uses the GPU. Not measured."""
ALLOCATOR_WASTE = 0.05
"""Share of a row's memory that PyTorch's allocator cannot use, as its blocks differ in size. Not measured."""
SAMPLER_BYTES = 3 * GB
"""Activations and graphs of vLLM. Not measured."""
SAMPLER_SHARE = 0.85
"""Share of a GPU that vLLM takes: gpu_memory_utilization."""
MOST_TOKENS = 16384
"""Largest useful row: the weights' gathering and the launches vanish beside it."""
LEAST_TOKENS = 2048
"""Smallest useful row: below it, recomputing the layers of larger rows costs less than gathering weights."""
ADAPTER_SLOTS = 8
"""Adapters of one batch of the sampler: max_loras."""
RAY_STORE = 256 * MiB
_BFLOAT16, _FLOAT32 = 2, 4


@dataclass(frozen=True, slots=True)
class Demand:
    """Hardware and use of the server that is planned."""

    gpus: int
    gpu_bytes: float
    context: int  # tokens of the longest sequence
    rank: int  # of LoRA; 0: full parameters
    tenants: int  # models in training at once
    chunk_bytes: int  # of full parameters on their way to the samplers: weight_chunk_mb

    @property
    def full(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line of the table."""

    place: str
    name: str
    bytes: float
    counted: bool = True  # in the sum of its place


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting of `serve`."""

    setting: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Result: the settings, and the memory that they ask for."""

    problem: str | None  # None: it fits
    lines: tuple[MemoryLine, ...]
    choices: tuple[Choice, ...]
    longest: int  # tokens of the longest row that would fit, of those that were measured
    room: float  # bytes of a trainer's GPU that models and rows may take


TRAINER, SAMPLER, HOST = "GPU of a trainer rank", "GPU of a sampler", "host memory"
SHARED, DISK = "shared memory", "disk"


def make_plan(demand: Demand, facts: BaseModelFacts, costs_of: Callable[[int], MemoryCosts]) -> CapacityPlan:
    """Plan with trainer and samplers apart, else, if that does not fit, with both on all GPUs in turns.

    `costs_of`: costs for a number of ranks.
    """
    apart = demand.gpus // 2
    numbers = [ranks for ranks in dict.fromkeys((apart, demand.gpus)) if ranks]
    plans = [_Division(demand, facts, ranks, costs_of(ranks)).plan() for ranks in numbers[:1]]
    if plans[0].problem is not None and len(numbers) > 1:
        plans.append(_Division(demand, facts, numbers[1], costs_of(numbers[1])).plan())
    return next((plan for plan in plans if plan.problem is None), plans[-1])


@dataclass(slots=True)
class _Division:
    """GPUs divided between trainer and samplers."""

    demand: Demand
    facts: BaseModelFacts
    ranks: int
    costs: MemoryCosts
    choices: list[Choice] = field(default_factory=list)

    @property
    def colocated(self) -> bool:
        return self.ranks == self.demand.gpus

    @property
    def room(self) -> float:
        """Bytes of a trainer's GPU for models and rows. A colocated sampler sleeps, but keeps its context."""
        return self.demand.gpu_bytes - CONTEXT_BYTES * (2 if self.colocated else 1)

    def plan(self) -> CapacityPlan:
        resident = self._resident()
        row_room = self._row_room(resident)
        costs, context = self.costs, self.demand.context
        recompute = costs.kept.needed(context) > row_room
        longest = costs.recomputed.tokens_within(row_room)
        problem = self._problem(longest, self._cache_tokens())
        self._choose(resident, row_room)
        lines = (
            *self._trainer_lines(resident, recompute),
            *self._sampler_lines(),
            *self._host_lines(resident),
        )
        return CapacityPlan(problem, (*lines, *self._file_lines()), tuple(self.choices), longest, self.room)

    def _fixed(self, resident: int) -> float:
        """Bytes between passes, and what a pass keeps of each adapter's gradients beyond the first."""
        costs = self.costs
        kept = 0 if self.demand.full else _FLOAT32 * costs.trained * (resident - 1)
        return costs.weights + resident * costs.state + kept + self._transfer()

    def _row_room(self, resident: int) -> float:
        return (self.room - self._fixed(resident)) / (1 + ALLOCATOR_WASTE)

    def _resident(self) -> int:
        """Return the models that stay on the GPU: as many as leave room for the longest sequence."""
        needed = self.costs.recomputed.needed(self.demand.context)
        tenants = self.demand.tenants
        if self.demand.full:  # these never leave
            return tenants
        return next((number for number in range(tenants, 1, -1) if self._row_room(number) >= needed), 1)

    def _transfer(self) -> float:
        return self.demand.chunk_bytes if self.demand.full else 0

    def _problem(self, longest: int, cached: float) -> str | None:
        demand = self.demand
        if longest < demand.context:
            return (
                f"a sequence of {demand.context} tokens does not fit beside the weights into "
                f"{demand.gpu_bytes / GB:g} GB, even with recomputed layers: at most {longest} tokens do"
                + (f" with {demand.tenants} models in training" if demand.full else "")
            )
        if cached < demand.context:
            return f"the samplers have room for {max(0, int(cached))} tokens, not for one sequence"
        return None

    # Samplers

    @property
    def _samplers(self) -> int:
        return self.demand.gpus if self.colocated else self.demand.gpus - self.ranks

    @property
    def _base_bytes(self) -> int:
        return _BFLOAT16 * self.costs.parameters

    def _tensor_parallel(self) -> int:
        """Return the fewest GPUs per replica whose weights leave half of them to the cache."""
        sizes = [1 << power for power in range(7) if 1 << power <= self._samplers]
        sizes = [size for size in sizes if self._samplers % size == 0 and self.facts.num_kv_heads % size == 0]
        half = SAMPLER_SHARE * self.demand.gpu_bytes / 2
        return next((size for size in sizes if self._base_bytes / size <= half), sizes[-1])

    def _slot_bytes(self) -> float:
        """Adapters that vLLM has room for on each GPU."""
        return 0 if self.demand.full else ADAPTER_SLOTS * _BFLOAT16 * self.costs.trained

    def _cache_bytes(self) -> float:
        """Bytes of the keys and values on each GPU."""
        taken = self._base_bytes / self._tensor_parallel() + self._slot_bytes() + SAMPLER_BYTES
        return SAMPLER_SHARE * self.demand.gpu_bytes - taken

    def _cache_tokens(self) -> float:
        """Tokens whose keys and values fit into one replica."""
        facts = self.facts
        per_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * _BFLOAT16
        return self._cache_bytes() * self._tensor_parallel() / per_token

    # Settings

    def _choose(self, resident: int, row_room: float) -> None:
        demand, costs, size = self.demand, self.costs, self._tensor_parallel()
        self._add("device", "cuda", "")
        self._add(
            "trainer_dtype", "bfloat16", "half the memory of float32, and the attention kernels need it"
        )
        self._add(
            "placement",
            "colocated" if self.colocated else "separate",
            "trainer and samplers take turns on the same GPUs"
            if self.colocated
            else "neither waits for the other",
        )
        self._add("trainer_ranks", self.ranks, f"{costs.weights / GB:.1f} GB of the base on each")
        self._add("tensor_parallel_size", size, "the fewest GPUs that leave half of them to keys and values")
        tokens = self._cache_tokens()
        self._add("replicas", self._samplers // size, f"keys and values of {tokens:,.0f} tokens in each")
        self._add("context_length", demand.context, "as asked")
        kept, most = costs.kept.tokens_within(row_room), costs.recomputed.tokens_within(row_room)
        fast = kept >= LEAST_TOKENS
        self._add(
            "token_budget",
            min(MOST_TOKENS, _power_of_two(kept if fast else most)),
            f"rows of up to {kept:,} tokens keep all activations; of longer ones, up to {most:,}, the layers "
            "are recomputed",
        )
        if not demand.full:
            self._add("max_lora_rank", demand.rank, "samplers reserve memory for adapters of this rank")
            if resident < demand.tenants:
                self._add("resident_models", resident, f"no more fit beside a row of {demand.context} tokens")

    def _add(self, setting: str, value: Any, reason: str) -> None:
        self.choices.append(Choice(setting, value, reason))

    # Table

    def _trainer_lines(self, resident: int, recompute: bool) -> Iterator[MemoryLine]:
        costs, demand = self.costs, self.demand
        one = "full copy" if demand.full else f"adapter of rank {demand.rank}"
        yield MemoryLine(TRAINER, "weights of the frozen base", costs.weights)
        weight = _FLOAT32 * costs.trained / (self.ranks if demand.full else 1)
        for name, count in (("weights", 1), ("gradients", 1), ("moments", 2)):
            yield MemoryLine(TRAINER, f"{name} of {resident} x {one}", resident * count * weight)
        if not demand.full:
            yield MemoryLine(TRAINER, "their gradients before the pass, to undo it", (resident - 1) * weight)
        row = f"row of {demand.context} tokens"
        for name, memory, counted in (
            ("all activations kept", costs.kept, not recompute),
            ("layers recomputed", costs.recomputed, recompute),
        ):
            yield MemoryLine(TRAINER, f"{row}, {name}", memory.needed(demand.context), counted)
        chosen = (costs.recomputed if recompute else costs.kept).needed(demand.context)
        yield MemoryLine(TRAINER, "lost to the allocator (assumed)", ALLOCATOR_WASTE * chosen)
        if demand.full:
            yield MemoryLine(TRAINER, "transfer buffer", self._transfer())
        yield MemoryLine(TRAINER, "CUDA contexts (assumed)", self.demand.gpu_bytes - self.room)
        yield MemoryLine(TRAINER, "activations per token, kept", costs.kept.per_token, False)
        yield MemoryLine(TRAINER, "activations per token, recomputed", costs.recomputed.per_token, False)

    def _sampler_lines(self) -> Iterator[MemoryLine]:
        yield MemoryLine(SAMPLER, "weights", self._base_bytes / self._tensor_parallel())
        if not self.demand.full:
            yield MemoryLine(SAMPLER, f"slots of {ADAPTER_SLOTS} adapters", self._slot_bytes())
        yield MemoryLine(SAMPLER, "activations and graphs (assumed)", SAMPLER_BYTES)
        yield MemoryLine(SAMPLER, "keys and values", self._cache_bytes())

    def _host_lines(self, resident: int) -> Iterator[MemoryLine]:
        costs = self.costs
        yield MemoryLine(HOST, "the base's file, mapped, for all ranks together", self._base_bytes)
        waiting = self.demand.tenants - resident
        if waiting:
            name = f"{waiting} models off the GPU, on each rank"
            yield MemoryLine(HOST, name, self.ranks * waiting * costs.state)
        yield MemoryLine(HOST, "a model's weights on their way to the samplers", _BFLOAT16 * costs.trained)
        yield MemoryLine(HOST, "its training state on the way to the disk", 3 * _FLOAT32 * costs.trained)
        if self.colocated:
            share = costs.weights + resident * costs.state
            yield MemoryLine(HOST, "trainer's state while samplers work", self.ranks * share)

    def _file_lines(self) -> Iterator[MemoryLine]:
        trained, full = self.costs.trained, self.demand.full
        yield MemoryLine(SHARED, "Ray's object store", RAY_STORE)
        yield MemoryLine(SHARED, "unnamed sampler weights, each", _BFLOAT16 * trained)
        named = (_BFLOAT16 if full else _FLOAT32) * trained
        yield MemoryLine(DISK, "save_weights_for_sampler by name, each", named)
        yield MemoryLine(DISK, "save_state, each", 3 * _FLOAT32 * trained)


def _power_of_two(most: int) -> int:
    return 1 << max(0, most.bit_length() - 1)
