"""Settings that belong together, each group a table with keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from skyrl_tinker.protocol.schemas.base import Table

SamplerEngine = Literal["vllm", "sglang"]


def absolute(given: Path | None) -> Path | None:
    """Commands and actors use a path, too, from other directories."""
    return given and given.absolute()


class Timeouts(Table):
    """Waits of clients and of their requests."""

    long_poll_s: float = Field(20.0, gt=0, lt=45)
    """Longest wait of a request for a result"""
    session_s: float = Field(600.0, gt=0)
    """Time without heartbeat and request after which a session's models are released"""
    request_s: float = Field(86400.0, gt=0)
    """Time after which a waiting request fails and names the reason of its wait"""
    base_idle_s: float = Field(1800.0, gt=0)
    """Time without requests after which a base model stops that starts on demand"""


class ConnectionLimits(Table):
    """Connections of clients at once."""

    total: int = Field(10_000, ge=1)
    """Connections at once; beyond it new ones get 503 and are closed"""
    per_address: int = Field(5_000, ge=1)
    """Connections at once from one address, which for a proxy's clients is its own; beside others fewer, so
    that newcomers find some
    """


class Bodies(Table):
    """Bounds of request bodies."""

    wire_mb: int = Field(64, ge=1)
    """Largest body of a pass as sent, in protobuf"""
    expanded_mb: int = Field(64, ge=1)
    """Largest body of a pass after decompression"""
    json_mb: int = Field(16, ge=1)
    """Largest other body, as sent and after decompression"""
    held_mb: int = Field(32, ge=1)
    """Large request bodies held at once, as sent; as much again expanded; both again for OpenAI clients"""


class EphemeralWeights(Table):
    """Room of unnamed sampler weights."""

    keep: int = Field(32, ge=1)
    """Newest unnamed sampler weights that each model keeps in any case"""
    idle_s: float = Field(3600.0, gt=0)
    """Time after their last sample that older unnamed sampler weights are kept"""
    gb: float | None = Field(None, gt=0)
    """Memory and disk that unnamed sampler weights of all models may take; beyond it the oldest go; sampling
    them then fails and asks for a new save [default: a quarter of the disk under home]
    """


class Retention(Table):
    """Time that records are kept."""

    results_s: float = Field(86400.0, gt=0)
    """Time that results are kept, and records of samples after their last use; twice that the records of
    ended requests
    """
    history_s: float = Field(7776000.0, gt=0)
    """Time that usage, audit events, removed checkpoints and ended sessions are listed"""
    checkpoints_s: int | None = Field(None, ge=3600, le=10 * 365 * 86400)
    """Time to live of checkpoints that are saved or copied without one [default: they do not expire]"""


class Recovery(Table):
    """Return of models after a crash, and the snapshots for it."""

    replay_s: float = Field(30.0, gt=0)
    """Time that models may take to come back after a crash, once fresh trainer ranks are up; snapshots see to
    it as far as snapshot_share allows
    """
    snapshot_share: float = Field(0.02, gt=0, lt=1)
    """Share of the trainer's time that snapshots for such a return may take"""


class Phases(Table):
    """Turns of trainer and samplers on the same devices."""

    min_s: float = Field(0.2, gt=0)
    """Shortest phase when colocated"""
    max_s: float = Field(10.0, gt=0)
    """Longest wait of one side while the other is busy when colocated"""


class Parity(Table):
    """Comparison of trainer and samplers."""

    canary: bool = True
    """Compare samplers and trainer at start; a mismatch is not served"""
    probe_tokens: int = Field(32, ge=0)
    """Tokens on which samplers and trainer are compared after each sync; 0 = never"""
    gap_bound: float | None = Field(None, gt=0)
    """Difference that causes a warning, at start a refusal [default: 1e-3, for bfloat16 0.25]"""


class BaseOverrides(Table):
    """A further base model of the server."""

    model_name: str | None = None
    """Name that clients use for it [default: as given]"""
    roles: tuple[Literal["train", "sample"], ...] = Field(
        ("sample",), description='Its uses: ["train", "sample"], ["train"], or the default, ["sample"]'
    )
    start: Literal["always", "on_demand"] = Field(
        "always", description='"always", or "on_demand": with its first request, until timeouts.base_idle_s'
    )
    context_length: int | None = Field(None, ge=2)
    """As the setting [default: the model's, at most 4096]"""
    trainer_ranks: int = Field(1, ge=1, le=64)
    """FSDP workers that train it"""
    token_budget: int | None = Field(None, ge=1)
    """As the setting [default: the server's]"""
    gradient_checkpointing: bool | None = None
    """As the setting [default: the server's]"""
    resident_models: int | None = Field(None, ge=0)
    """As the setting [default: the server's]"""
    sampler_engine: SamplerEngine | None = None
    """As the setting [default: the server's]"""
    sampler_python: Path | None = None
    """As the setting [default: the server's]"""
    replicas: int = Field(1, ge=0, le=64)
    """Sampling servers, each with a full copy of it; none without the role sample"""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """GPUs, on a CPU processes, of each replica"""
    vllm_args: dict[str, JsonValue] = Field({})
    """Further arguments of its servers"""
    reasoning_parser: str | None = None
    """As the setting [default: none]"""
    tool_parser: str | None = None
    """As the setting [default: none]"""
    sampler_urls: tuple[str, ...] = ()
    """Servers of it that run already, in place of replicas"""
    router_url: str | None = None
    """A router before these [default: one of our own]"""
    gpu_memory_utilization: float | None = Field(None, gt=0, lt=1)
    """Share of a GPU's memory that a replica takes [default: the server's]"""
    max_lora_rank: int | None = Field(None, ge=0, le=512)
    """Highest rank of its adapters; 0: it takes none [default: the server's]"""
    max_loras: int | None = Field(None, ge=1)
    """As the setting [default: the server's]"""
    sample_concurrency: int | None = Field(None, ge=1)
    """As the setting [default: the server's]"""

    _make_absolute = field_validator("sampler_python")(absolute)

    @field_validator("roles")
    @classmethod
    def _require_role(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if not given:
            raise ValueError('expected ["train", "sample"], ["train"] or ["sample"]')
        return given

    @model_validator(mode="after")
    def _settle_replicas(self) -> Self:
        """Have none, past pydantic as Settings does, for one that is only trained."""
        if not self.samples and "replicas" not in self.model_fields_set:
            self.__dict__["replicas"] = 0
        if self.samples and not self.replicas:
            raise ValueError('found replicas = 0, expected at least 1, or roles = ["train"]')
        if not self.samples and (self.replicas or self.sampler_urls):
            raise ValueError("found replicas or sampler_urls, expected none of them, or a role sample")
        return self

    @property
    def trains(self) -> bool:
        return "train" in self.roles

    @property
    def samples(self) -> bool:
        return "sample" in self.roles

    def applied(self, name: str) -> dict[str, Any]:
        """Return the settings by which those of this base model differ from the server's."""
        own = {key: value for key, value in self if key not in ("roles", "start")}
        inherited = {key for key, value in own.items() if value is None and key not in _NONE_OF_ITS_OWN}
        return {**_OF_FIRST, "base_model": name, **{key: own[key] for key in own.keys() - inherited}}


_NONE_OF_ITS_OWN = ("model_name", "context_length", "reasoning_parser", "tool_parser", "router_url")
"""Keys that are not the server's where a base model has none."""
_OF_FIRST: Mapping[str, Any] = {
    "bases": {},
    "placement": "separate",
    "prefill_urls": (),
    "decode_urls": (),
    "router_replay": False,
}
"""Settings that count for base_model alone, as they are for the others."""
