"""Memory that a server takes on GPUs divided in one way: trainer ranks, samplers, host and disk. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_tinker.domain.memory_costs import MemoryCosts, RowMemory
from skyrl_tinker.domain.state_size import cached_bytes, parameters
from skyrl_tinker.domain.units import GB, MiB
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.server.gpu_division import GpuDivision

CONTEXT_BYTES = 1.5 * GB
"""CUDA's context, libraries and their workspaces, in each process that uses the GPU. Not measured."""
ALLOCATOR_WASTE = 0.05
"""Share of a row's memory that PyTorch's allocator cannot use, as its blocks differ in size. Not measured."""
SAMPLER_BYTES = 3 * GB
"""Activations and graphs of a sampler. Not measured."""
RAY_STORE = 256 * MiB
_BFLOAT16, _FLOAT32 = 2, 4

TRAINER, SAMPLER, HOST = "GPU of a trainer rank", "GPU of a sampler", "host memory"
SHARED, DISK = "shared memory", "disk"


@dataclass(frozen=True, slots=True)
class Demand:
    """Hardware and use of the server that is planned."""

    gpus: int
    gpu_bytes: float
    context: int  # tokens of the longest sequence
    rank: int  # of LoRA; 0: full parameters
    tenants: int  # models in training at once
    chunk_bytes: int  # of full parameters on their way to the samplers
    adapter_slots: int  # of a sampler's batch: max_loras
    sampler_share: float  # of a GPU that it takes: gpu_memory_utilization
    expert_rank: int = 0  # of the slots of each expert, where a sampler has experts with adapters
    cached_adapters: int = 0  # that it keeps on the host: max_cpu_loras
    copies: int = 1  # GPUs of a replica for each one of its tensor parallelism
    trained: bool = True  # else the base model is only sampled
    given: Mapping[str, Any] = field(default_factory=dict)  # settings that are not the plan's to choose

    @property
    def full(self) -> bool:
        return self.rank == 0

    @property
    def longest_row(self) -> int:
        """Tokens: a sequence may be longer than the budget, and has a row of its own then."""
        return max(self.context, int(self.given.get("token_budget", 0)))


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line of the table."""

    place: str
    name: str
    bytes: float
    counted: bool = True  # in the sum of its place


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimate for one division of the GPUs."""

    demand: Demand
    facts: BaseModelFacts
    division: GpuDivision
    costs: MemoryCosts

    # Trainer

    @property
    def room(self) -> float:
        """Bytes of a trainer's GPU for models and rows. A colocated sampler sleeps, but keeps its context."""
        return self.demand.gpu_bytes - CONTEXT_BYTES * (2 if self.division.colocated else 1)

    @property
    def fast(self) -> RowMemory:
        """Rows that train fastest: all activations are kept, unless gradient_checkpointing is on."""
        return self.costs.recomputed if self.demand.given.get("gradient_checkpointing") else self.costs.kept

    @property
    def small(self) -> RowMemory:
        """Rows that take least: the layers are recomputed, unless gradient_checkpointing is off."""
        never = self.demand.given.get("gradient_checkpointing") is False
        return self.costs.kept if never else self.costs.recomputed

    @property
    def resident(self) -> int:
        """Models that stay on the GPU: as many as leave room for the longest row. Full ones never leave."""
        if self.demand.full:
            return self.demand.tenants
        most = self.models_beside(self.demand.longest_row)
        return self.demand.given.get("resident_models") or min(self.demand.tenants, most)

    def models_beside(self, tokens: int) -> int:
        """Count the adapters that leave room for a row; one at least, whether it does or not."""
        left = self.room - self._between_passes(1) - (1 + ALLOCATOR_WASTE) * self.small.needed(tokens)
        return 1 + max(0, int(left // (self._between_passes(2) - self._between_passes(1))))

    def row_room(self) -> float:
        return (self.room - self.state_bytes) / (1 + ALLOCATOR_WASTE)

    @property
    def state_bytes(self) -> float:
        """Bytes on a trainer's GPU that rows cannot have."""
        return self._between_passes(self.resident)

    def _between_passes(self, models: int) -> float:
        """Bytes between passes, and a pass's gradients of each adapter beyond the first."""
        costs = self.costs
        kept = 0 if self.demand.full else _FLOAT32 * costs.trained * (models - 1)
        return costs.weights + models * costs.state + kept + self._transfer

    @property
    def _transfer(self) -> float:
        """Two buffers: one chunk is read while the samplers take another."""
        return 2 * self.demand.chunk_bytes if self.demand.full else 0

    # Samplers

    @property
    def _base_bytes(self) -> int:
        return _BFLOAT16 * self.costs.parameters

    @property
    def _slot_bytes(self) -> float:
        """Adapters that a sampler has room for on each GPU."""
        if self.demand.full:
            return 0
        return self.demand.adapter_slots * _BFLOAT16 * (self.costs.trained + self._unused_of_slot)

    @property
    def _unused_of_slot(self) -> int:
        """Count the parameters by which the slots of experts are larger than an adapter."""
        if not self.facts.experts:
            return 0
        rank, chosen = self.demand.rank, self.facts.experts_per_token
        ranks = self.demand.expert_rank * chosen, rank
        slot, own = (LoraSpec(each, 0, train_attn=False, train_unembed=False) for each in ranks)
        return parameters(self.facts, slot) - parameters(self.facts, own)

    @property
    def _cache_bytes(self) -> float:
        """Bytes of the keys and values on each GPU."""
        taken = self._base_bytes / self.division.tensor_parallel + self._slot_bytes + SAMPLER_BYTES
        return self.demand.sampler_share * self.demand.gpu_bytes - taken

    @property
    def arriving(self) -> float:
        """Bytes of new full parameters that a GPU holds beside the sampler's.

        Thrice its largest chunk or layer: a chunk, parts that wait for the layer's rest, and the
        layer that it makes of them.
        """
        if not (self.demand.full and self.demand.trained):
            return 0
        facts = self.facts
        inner = 3 * facts.experts * facts.intermediate_size or 2 * facts.intermediate_size
        layer = _BFLOAT16 * facts.hidden_size * max(facts.vocab_size, inner)
        return 3 * max(self.demand.chunk_bytes, layer)

    @property
    def beside_sampler(self) -> float:
        """Bytes of its GPU that a sampler leaves, without the sleeping trainer's context."""
        left = (1 - self.demand.sampler_share) * self.demand.gpu_bytes
        return left - (CONTEXT_BYTES if self.division.colocated else 0)

    @property
    def half_cached(self) -> bool:
        """Return whether the weights leave half of a sampler's memory to keys and values."""
        half = self.demand.sampler_share * self.demand.gpu_bytes / 2
        return self._base_bytes / self.division.tensor_parallel <= half

    @property
    def cache_tokens(self) -> float:
        """Tokens whose keys and values fit into one replica."""
        return self._cache_bytes * self.division.tensor_parallel / cached_bytes(self.facts, "bfloat16")

    # Table

    def lines(self) -> tuple[MemoryLine, ...]:
        resident, trained = self.resident, self.demand.trained
        return (
            *(self._trainer_lines(resident) if trained else ()),
            *(self._sampler_lines() if self.division.replicas else ()),
            MemoryLine(HOST, "the base's file, mapped, for all ranks together", self._base_bytes),
            *(self._cached_adapters() if self.division.replicas and not self.demand.full else ()),
            *(self._host_lines(resident) if trained else ()),
            *(self._file_lines() if trained else ()),
        )

    def _trainer_lines(self, resident: int) -> Iterator[MemoryLine]:
        costs, demand, tokens = self.costs, self.demand, self.demand.longest_row
        one = "full copy" if demand.full else f"adapter of rank {demand.rank}"
        yield MemoryLine(TRAINER, "weights of the frozen base", costs.weights)
        weight = _FLOAT32 * costs.trained / (self.division.ranks if demand.full else 1)
        for name, count in (("weights", 1), ("gradients", 1), ("moments", 2)):
            yield MemoryLine(TRAINER, f"{name} of {resident} x {one}", resident * count * weight)
        if resident > 1 and not demand.full:
            yield MemoryLine(TRAINER, "their gradients before the pass, to undo it", (resident - 1) * weight)
        row, layers = costs.row(tokens), costs.layers
        chosen = row.again_within(self.row_room(), demand.given.get("gradient_checkpointing"))
        for again in sorted({0, chosen, layers}):
            name = f"{again} of {layers} layers recomputed" if again else "all activations kept"
            yield MemoryLine(TRAINER, f"row of {tokens} tokens, {name}", row.needed(again), again == chosen)
        waste = ALLOCATOR_WASTE * row.needed(chosen)
        yield MemoryLine(TRAINER, "lost to the allocator (assumed)", waste)
        if demand.full:
            yield MemoryLine(TRAINER, "transfer buffers", self._transfer)
        yield MemoryLine(TRAINER, "CUDA contexts (assumed)", demand.gpu_bytes - self.room)
        yield MemoryLine(TRAINER, "activations per token, kept", costs.kept.per_token, False)
        yield MemoryLine(TRAINER, "activations per token, recomputed", costs.recomputed.per_token, False)

    def _sampler_lines(self) -> Iterator[MemoryLine]:
        yield MemoryLine(SAMPLER, "weights", self._base_bytes / self.division.tensor_parallel)
        if not self.demand.full:
            yield MemoryLine(SAMPLER, f"slots of {self.demand.adapter_slots} adapters", self._slot_bytes)
        yield MemoryLine(SAMPLER, "activations and graphs (assumed)", SAMPLER_BYTES)
        yield MemoryLine(SAMPLER, "keys and values", self._cache_bytes)
        if self.arriving:
            yield MemoryLine(SAMPLER, "new weights as they arrive, beside the sampler's share", self.arriving)

    def _cached_adapters(self) -> Iterator[MemoryLine]:
        processes, adapters = (
            self.division.replicas * self.division.tensor_parallel,
            self.demand.cached_adapters,
        )
        cached = processes * adapters * _BFLOAT16 * self.costs.trained
        yield MemoryLine(HOST, f"{adapters} adapters in each process of the samplers, at most", cached)

    def _host_lines(self, resident: int) -> Iterator[MemoryLine]:
        costs, ranks = self.costs, self.division.ranks
        waiting = self.demand.tenants - resident
        if waiting > 0:
            yield MemoryLine(
                HOST, f"{waiting} models off the GPU, on each rank", ranks * waiting * costs.state
            )
        yield MemoryLine(HOST, "a model's weights on their way to the samplers", _BFLOAT16 * costs.trained)
        yield MemoryLine(HOST, "its training state on the way to the disk", 3 * _FLOAT32 * costs.trained)
        if self.division.colocated:
            share = costs.weights + resident * costs.state
            yield MemoryLine(HOST, "trainer's state while samplers work", ranks * share)

    def _file_lines(self) -> Iterator[MemoryLine]:
        trained, full = self.costs.trained, self.demand.full
        yield MemoryLine(SHARED, "Ray's object store", RAY_STORE)
        yield MemoryLine(SHARED, "unnamed sampler weights, each", _BFLOAT16 * trained)
        named = (_BFLOAT16 if full else _FLOAT32) * trained
        yield MemoryLine(DISK, "save_weights_for_sampler by name, each", named)
        yield MemoryLine(DISK, "save_state, each", 3 * _FLOAT32 * trained)
