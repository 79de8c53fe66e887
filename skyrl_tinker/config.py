"""Settings, frozen and parsed once.

Sources, strongest first, for each key of a table: arguments, SKYRL_TINKER_…, --config FILE.toml.
"""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

from pydantic import (
    BaseModel,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.base import Table, describe, fit_json
from skyrl_tinker.protocol.schemas.session import SdkFlags
from skyrl_tinker.protocol.validation.key_limits import KeyLimits

_SETUP_ONLY = frozenset({"torch_index"})  # SKYRL_TINKER_… variables that only scripts/setup reads
_Engine = Literal["vllm", "sglang"]
_ON_CUDA = {"trainer_dtype": "bfloat16", "token_budget": 16384}
"""Defaults that device cuda changes: attention in float32 would keep matrices of [T, T], and a GPU waits for
the launches of short rows.
"""


def _absolute(given: Path | None) -> Path | None:
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
    gap_s: float = Field(900.0, gt=0)
    """Longest time that a model waits for a missing seq_id, as one of a client that is away; then that number
    counts as a failed request. The SDK tries to send one for 300 s
    """
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
    """Large request bodies held at once, as sent; as much again expanded"""
    datums: int = Field(4096, ge=1)
    """Most datums of a forward_backward"""


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
    """Time that results are kept; twice that the records of ended requests"""
    history_s: float = Field(7776000.0, gt=0)
    """Time that usage, audit events, removed checkpoints and ended sessions are listed"""
    stability_s: float = Field(86400.0, gt=0)
    """Time that the record of a sample is kept after its last use"""
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
    sampler_engine: _Engine | None = None
    """As the setting [default: the server's]"""
    sampler_python: Path | None = None
    """As the setting [default: the server's]"""
    replicas: int = Field(1, ge=0, le=64)
    """Sampling servers, each with a full copy of it [default: 1, without the role sample 0]"""
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
    max_cpu_loras: int | None = Field(None, ge=1)
    """As the setting [default: the server's]"""
    sample_concurrency: int | None = Field(None, ge=1)
    """As the setting [default: the server's]"""

    _make_absolute = field_validator("sampler_python")(_absolute)

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
        inherited = {key for key in _INHERITED if own[key] is None}
        return {**_OF_FIRST, "base_model": name, **{key: own[key] for key in own.keys() - inherited}}


_INHERITED = (
    "token_budget",
    "gradient_checkpointing",
    "resident_models",
    "sampler_engine",
    "sampler_python",
    "gpu_memory_utilization",
    "max_lora_rank",
    "max_loras",
    "max_cpu_loras",
    "sample_concurrency",
)
_OF_FIRST: Mapping[str, Any] = {
    "bases": {},
    "placement": "separate",
    "prefill_urls": (),
    "decode_urls": (),
    "router_replay": False,
}
"""Settings that count for base_model alone, as they are for the others."""


class Settings(BaseSettings):
    """Every setting of the server. Unknown keys are refused."""

    model_config = SettingsConfigDict(
        env_prefix="SKYRL_TINKER_",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
    _fit_json = field_validator("*")(fit_json)
    _make_absolute = field_validator("tls_cert", "tls_key", "sampler_python")(_absolute)

    base_model: str = "tiny"
    """'tiny', a model directory, or a hub name"""
    model_name: str | None = None
    """Name that clients use for the base model [default: the base model as given]"""
    bases: dict[str, BaseOverrides] = {}
    """A further base model, given as base_model is; give it once for each. It is sampled only, as a teacher
    is; with :train,sample behind its name it is trained, too, with :train only trained. With on_demand there,
    as in :sample,on_demand, it starts with its first request. With keys of its own as a table [bases.NAME] in
    a file, or JSON in the environment
    """
    host: str = "127.0.0.1"
    """Address to listen on"""
    port: int = Field(8000, ge=0, le=65535)
    """0 = any free one"""
    api_processes: int = Field(1, ge=1, le=64)
    """API processes on this host, which share its port, and of the limits of connections and held bodies have
    one part each
    """
    allowed_hosts: tuple[str, ...] = ()
    """Further name by which clients reach a server without keys, such as a proxy's, beside localhost, its
    host name and addresses; give it once for each, * for any
    """
    trust_forwarded: bool = False
    """Make download URLs from X-Forwarded-Proto, -Host and -Prefix, where a proxy sets them"""
    tls_cert: Path | None = None
    """Certificate chain in PEM: clients then use https://"""
    tls_key: Path | None = None
    """The certificate's private key in PEM, not encrypted"""
    insecure: bool = False
    """Allow a host that is open to the network without API keys"""
    engine_listen: str | None = None
    """HOST:PORT where the engine answers API processes on other hosts (skyrl-tinker api), of a private
    network [default: none]
    """
    standby: bool = False
    """Wait while another server works on the database (PostgreSQL), and take over once it gives no sign of
    life; checkpoints and snapshots lie where both hosts find them
    """

    home: Path = Path(".skyrl-tinker")
    """Database, logs and checkpoints"""
    database_url: str | None = None
    """postgresql+psycopg://USER@HOST/NAME, or a file [default: SQLite under home]"""
    checkpoints: str | None = None
    """Where checkpoints lie: a directory, or a URL such as s3://BUCKET/PREFIX (extra s3), of which
    <home>/checkpoints then is the cache [default: <home>/checkpoints]
    """
    checkpoint_cache_gb: float | None = Field(None, gt=0)
    """Size of the cache of checkpoints, beyond which those go that were not used for longest, but for an hour
    at least [default: no bound]
    """
    snapshots: str | None = None
    """Place of snapshots, which bring models back after a crash: a directory, or a URL as for checkpoints
    [default: under home]
    """
    min_free_gb: float = Field(1.0, ge=0)
    """Free disk, under home and for checkpoints, below which new work is refused; accepted requests go on,
    and all resumes once there is room
    """
    retention: Retention = Retention()
    ephemeral: EphemeralWeights = EphemeralWeights()

    device: Literal["cpu", "cuda"] = "cpu"
    """cpu or cuda"""
    trainer_ranks: int = Field(1, ge=1, le=64)
    """FSDP workers [on cuda: as planned]"""
    trainer_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="float32 or bfloat16, of the trainer's computation and the samplers "
        f"[on cuda: {_ON_CUDA['trainer_dtype']}]",
    )
    token_budget: int = Field(
        2048,
        ge=1,
        description="Tokens of a row, in which a trainer rank computes short sequences together; a longer "
        "sequence has a row of its own. More are faster and take more memory; results differ in rounding "
        f"[on cuda: as planned, else {_ON_CUDA['token_budget']}]",
    )
    gradient_checkpointing: bool | None = None
    """Keep only the inputs of the layers for the backward pass and compute the rest again: less memory for a
    third more work [default: of as many layers as would not fit otherwise]
    """
    resident_models: int = Field(0, ge=0)
    """LoRA models on the trainer's devices at once, others wait on the host; 0 = all [on cuda: as planned]"""
    trainer_memory_gb: float | None = Field(None, gt=0)
    """Memory that models may take per FSDP worker; beyond it no full-parameter model is made [default: the
    machine's memory]
    """
    unit_tokens: int | None = Field(None, ge=1)
    """Tokens that one unit of work takes from all lanes [default: 16384, or two micro-batches of every worker
    if that is more]
    """
    max_lora_rank: int = Field(64, ge=0, le=512)
    """Highest LoRA rank that a client may choose; 0: full parameters only, samplers take no adapters"""
    context_length: int | None = Field(None, ge=2)
    """Most prompt and generated tokens of a sequence [default: the model's, at most 4096]"""
    recovery: Recovery = Recovery()

    sampler_engine: _Engine = "vllm"
    """Sampling engine; docs/samplers.md has the abilities of each"""
    sampler_python: Path | None = None
    """Python interpreter of the environment that has SGLang [default: the server's own]"""
    replicas: int = Field(1, ge=0, le=64)
    """Sampling servers, each with a full copy of the model; 0: base_model is only trained, and sampling it is
    refused [on cuda: as planned]
    """
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """GPUs, on a CPU processes, of each replica [on cuda: as planned]"""
    vllm_args: dict[str, JsonValue] = {}
    """A further argument of vLLM as NAME=VALUE, such as max-num-seqs=512 or enable-prefix-caching=false; give
    it once for each. A table in a file, JSON in the environment; SGLang takes none
    """
    gpu_memory_utilization: float = Field(0.85, gt=0, lt=1)
    """Share of a GPU's memory that a replica takes: vLLM's while awake, SGLang's for weights and KV cache, to
    which its activations come
    """
    max_loras: int = Field(8, ge=1)
    """Adapters that run at once, in the batches of the replicas; more take turns"""
    max_cpu_loras: int = Field(32, ge=1)
    """Adapters that a replica holds in the host's memory"""
    sample_concurrency: int | None = Field(None, ge=1)
    """Sequences in flight per replica, of each data-parallel rank if it has several, beyond which samples
    wait for their turns; sessions that have none there get more. Default: 256, on a CPU 96 unless one session
    is alone
    """
    sampled_logprobs: Literal["raw", "processed"] = "raw"
    """Logprobs of sampled tokens: raw are the model's at temperature 1, processed those of the distribution
    sampled from, after temperature, top_k and top_p
    """
    inflight_cache: Literal["recompute", "keep"] = "recompute"
    """Keys and values of samples under way when new weights of all parameters come: computed again, or kept,
    which saves a prefill of each and leaves them as the old weights made them. Under adapters they are always
    computed again
    """
    router_replay: bool = False
    """Qwen3-MoE: record the experts of each token of samples made with record_stability_info, and train
    datums whose provenance spans name these samples with them
    """
    reasoning_parser: str | None = None
    """vLLM's parser that puts the reasoning of chat answers in a field of its own, as qwen3 [default: it
    stays in their text]
    """
    tool_parser: str | None = None
    """The sampling engine's parser that reads tool calls in chat answers, as hermes for Qwen3 [default:
    requests with tools are refused]
    """
    sampler_urls: tuple[str, ...] = ()
    """A server of sampler_engine that runs already, in place of replicas; give it once for each. On this host
    it must see our files under our paths, vLLM's on others pull them (docs/external-samplers.md)
    """
    prefill_urls: tuple[str, ...] = ()
    """A vLLM server that runs already and computes prompts for those of decode_urls, with a KV connector
    between them; give it once for each
    """
    decode_urls: tuple[str, ...] = ()
    """A vLLM server that runs already and continues prompts of prefill_urls' ones; give it once for each"""
    router_url: str | None = None
    """A router before the servers by URL [default: one of our own]"""

    placement: Literal["auto", "separate", "colocated"] = "auto"
    """separate, or colocated: trainer and samplers take turns on the same devices; auto: colocated where not
    both fit on the GPUs
    """
    plan: bool = True
    """On cuda: estimate the memory, choose by it the ranks, replicas, row lengths and resident models that
    are not given, and refuse settings that do not fit; else choose the placement alone
    """
    phases: Phases = Phases()
    weight_transport: Literal["auto", "shared_memory", "gloo", "nccl", "cuda_ipc"] = "auto"
    """Way of full parameters to the samplers; auto: by device and placement"""
    parity: Parity = Parity()
    ray_address: str | None = None
    """Ray cluster to join, as HOST:6379 or auto; this host must be a node of it [default: one of our own on
    this host]
    """
    network_interface: str | None = None
    """Network interface of the traffic between trainer ranks, and of weights over NCCL [default: that of the
    address which Ray has for the host]
    """

    sdk: SdkFlags = SdkFlags()
    timeouts: Timeouts = Timeouts()
    sample_backlog: int = Field(20000, ge=1)
    """Samples of one base model that may wait; beyond it asample and /oai answer 429 and clients try again"""
    keys: KeyLimits = KeyLimits()
    connections: ConnectionLimits = ConnectionLimits()
    bodies: Bodies = Bodies()

    metrics_key: bool = False
    """Have /metrics ask for an admin key, and then also count requests and tokens by owner"""
    otlp_endpoint: str | None = None
    """OpenTelemetry collector, as http://localhost:4318, that gets a trace of each request by OTLP over HTTP;
    needs the extra otlp [default: none]
    """

    @field_validator("*", mode="before")
    @classmethod
    def _check_texts(cls, given: object) -> object:
        """Refuse empty texts, which are the current directory as a path, and any address as a host."""
        texts = given if isinstance(given, list | tuple) else (given,)
        if "" in texts:
            raise ValueError("expected a value, or no such setting")
        if any("\0" in text for text in texts if isinstance(text, str)):
            raise ValueError("expected a text without NUL")
        return given

    @field_validator("engine_listen")
    @classmethod
    def _check_address(cls, given: str | None) -> str | None:
        if given is not None:
            _split_address(given)
        return given

    @field_validator("host")
    @classmethod
    def _without_brackets(cls, given: str) -> str:
        """Take an IPv6 address as it stands in a URL, too."""
        return given.removeprefix("[").removesuffix("]")

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _read_place(cls, given: object) -> object:
        return str(given) if isinstance(given, Path) else given

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))

    @field_validator("bases")
    @classmethod
    def _require_different_bases(
        cls, given: dict[str, BaseOverrides], others: ValidationInfo
    ) -> dict[str, BaseOverrides]:
        if "" in given:
            raise ValueError("found an empty name, expected a model directory, or a hub name")
        pairs = [(others.data.get("base_model"), others.data.get("model_name"))]
        pairs += [(name, own.model_name) for name, own in given.items()]
        names = sorted(chain.from_iterable(filter(None, {*pair}) for pair in pairs))
        if twice := next((name for name, after in pairwise(names) if name == after), None):
            raise ValueError(f"{twice!r} names two base models, expected different names")
        return given

    @model_validator(mode="after")
    def _change_defaults(self) -> Self:
        """Change them past pydantic, so that model_fields_set still names the given ones alone."""
        if self.device == "cuda":
            unset = _ON_CUDA.keys() - self.model_fields_set
            self.__dict__.update({name: _ON_CUDA[name] for name in unset})
        return self

    def for_base(self, name: str) -> Self:
        """Return the settings of one of `bases`, by its name there or its model_name; else these."""
        for given, own in self.bases.items():
            if name in (given, own.model_name):
                return self.model_copy(update=own.applied(given))
        return self

    def idle_s_of(self, name: str) -> float | None:
        """Return the time without requests after which a base model stops, None for one that always runs."""
        found = (own for given, own in self.bases.items() if name in (given, own.model_name))
        return self.timeouts.base_idle_s if any(own.start == "on_demand" for own in found) else None

    @property
    def further_trained(self) -> list[Self]:
        """Settings of each of `bases` that is trained, too."""
        return [self.for_base(name) for name, own in self.bases.items() if own.trains]

    @property
    def all_trainer_ranks(self) -> int:
        """Trainer ranks of all base models."""
        return sum(each.trainer_ranks for each in (self, *self.further_trained))

    @property
    def root(self) -> Path:
        return self.home.absolute()

    @property
    def engine_address(self) -> tuple[str, int] | None:
        """Host and port of engine_listen."""
        return None if self.engine_listen is None else _split_address(self.engine_listen)

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def samples(self) -> bool:
        """Use of samplers, ours or those by URL."""
        return self.replicas > 0

    @property
    def external_urls(self) -> tuple[str, ...]:
        """URLs of servers that are not ours, those that decode first."""
        return self.sampler_urls + self.decode_urls + self.prefill_urls

    def api_share(self, value: int) -> int:
        """Return the part of one API process in a limit of all on this host."""
        return -(-value // self.api_processes)

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{quote(str(self.root / 'skyrl-tinker.db'))}"

    @property
    def checkpoint_root(self) -> Path:
        """Local directory of checkpoints, complete or a cache."""
        local = None if self.checkpoint_url else self.checkpoints
        return (Path(local) if local else self.root / "checkpoints").absolute()

    @property
    def checkpoint_url(self) -> str | None:
        return self.checkpoints if self.checkpoints and "://" in self.checkpoints else None

    @property
    def snapshot_url(self) -> str | None:
        return self.snapshots if self.snapshots and "://" in self.snapshots else None


FORMER: Mapping[str, str | None] = {
    **{f"key_{name}": f"keys.{name}" for name in KeyLimits.model_fields},
    **{f"ephemeral_{name}": f"ephemeral.{name}" for name in EphemeralWeights.model_fields},
    **{f"phase_{name}": f"phases.{name}" for name in Phases.model_fields},
    **{name: f"recovery.{name}" for name in Recovery.model_fields},
    **{name: f"sdk.{name}" for name in SdkFlags.model_fields},
    "canary": "parity.canary",
    "expanded_body_mb": "bodies.expanded_mb",
    "gap_deadline_s": "timeouts.gap_s",
    "gap_probe_tokens": "parity.probe_tokens",
    "held_bodies_mb": "bodies.held_mb",
    "history_ttl_s": "retention.history_s",
    "json_body_mb": "bodies.json_mb",
    "log_mb": None,
    "logprob_gap_bound": "parity.gap_bound",
    "long_poll_s": "timeouts.long_poll_s",
    "max_connections": "connections.total",
    "max_connections_per_address": "connections.per_address",
    "max_datums": "bodies.datums",
    "request_deadline_s": "timeouts.request_s",
    "result_ttl_s": "retention.results_s",
    "router_policy": None,
    "sampler_hang_s": None,
    "sampler_startup_s": None,
    "sampler_step_s": None,
    "session_timeout_s": "timeouts.session_s",
    "stability_ttl_s": "retention.stability_s",
    "trainer_threads": None,
    "unit_ms": None,
    "weight_chunk_mb": None,
    "wire_body_mb": "bodies.wire_mb",
}
"""Former names of settings with the present ones, None where there is none."""
SECTIONS = {
    "base_model": "Server",
    "home": "Storage",
    "device": "Trainer",
    "sampler_engine": "Samplers",
    "placement": "Trainer and samplers",
    "sdk": "Clients",
    "metrics_key": "Observation",
}
"""Titles of the sections of the settings, each by its first setting."""


def load(config: Path | None = None, **overrides: Any) -> Settings:
    """Parse the settings. Overrides that are None count as not given; model_fields_set names the given ones.

    A table may be given as texts NAME=VALUE. Raises pydantic.ValidationError that names the unknown key or
    the bad value, and UserError for a file that is no TOML, or a variable that is no JSON where it has to be.
    """
    overridden: dict[str, Any] = _unknown_variables() | {
        name: _read_pairs(name, value) if takes_pairs(name) and isinstance(value, list | tuple) else value
        for name, value in overrides.items()
        if value is not None
    }

    class _FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=config)

    try:
        read = _FromFile(**overridden)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"--config: not a TOML file: {error}") from error
    except SettingsError as error:
        raise _no_json(error) from error
    return Settings.model_validate(read.model_dump(exclude_unset=True))


def read_back(file: Path) -> Settings:
    """Read all settings, as `serve` writes them for its processes. Raises OSError, and UserError."""
    try:
        found = Settings.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UserError(f"{file}: {describe(error.errors(include_url=False))}") from error
    if missing := Settings.model_fields.keys() - found.model_fields_set:
        raise UserError(f"{file}: {min(missing)} is missing, expected every setting of a server")
    return found


def keys_of(name: str) -> dict[str, FieldInfo]:
    """Return the keys of a setting that is a table of ours, by their full names."""
    field = Settings.model_fields.get(name)
    table: Any = BaseOverrides if name == "bases" else field and field.annotation
    prefix = f"{name}.NAME" if name == "bases" else name
    return {f"{prefix}.{key}": each for key, each in getattr(table, "model_fields", {}).items()}


def takes_pairs(name: str) -> bool:
    """Return whether the command line takes a setting as NAME=VALUE."""
    return name == "vllm_args" or bool(keys_of(name))


def default_of(field: FieldInfo) -> str:
    """Return the default as a file has it, "" where the description has it."""
    if field.default in (None, (), {}) or isinstance(field.default, BaseModel | tuple):
        return ""
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)


def description_of(field: FieldInfo) -> str:
    """Return the description in one line, of a table that of its class."""
    return " ".join((field.description or field.annotation.__doc__ or "").split()).removesuffix(".")


def successor(name: str) -> str:
    """Return the remedy for a name that was a setting, "" for any other."""
    if (new := FORMER.get(name)) is None:
        return "no setting any more" if name in FORMER else ""
    table, _, key = new.partition(".")
    return f"now {new} (--{table} {key}=…, [{table}] in a file)"


def _split_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("expected HOST:PORT")
    return host, int(port)


def _no_json(error: SettingsError) -> UserError:
    """Name the variable of pydantic_settings' words: error parsing value for field "NAME" from source …."""
    name = str(error).split('"')[1].upper()
    variable = f"{Settings.model_config['env_prefix']}{name}"
    return UserError(f'environment variable {variable}: expected JSON, as ["a", "b"] or {{"a": 1}}')


def _read_pairs(name: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Read texts NAME=VALUE, of which a name alone is true. Values of vLLM are JSON where they can be.

    Those of `bases` are names, with uses behind them or without. Raises UserError for unknown uses.
    """
    if name == "bases":
        return dict(map(_read_base, pairs))
    split = (pair.partition("=") for pair in pairs)
    texts = {key: value if equals else "true" for key, equals, value in split}
    return texts if keys_of(name) else {key: _json_or_text(value) for key, value in texts.items()}


def _read_base(text: str) -> tuple[str, dict[str, Any]]:
    """Read NAME or NAME:USES, which are roles, and on_demand. A directory's name may contain colons."""
    name, _, behind = text.rpartition(":")
    if not name or "/" in behind or Path(text).exists():
        return text, {"roles": ["sample"]}
    uses, known = behind.split(","), ("train", "sample", "on_demand")
    if unknown := [each for each in uses if each not in known]:
        expected = "expected train, sample or on_demand, with commas between them"
        raise UserError(f"--also {text}: found {unknown[0]!r} behind the name, {expected}")
    roles = [each for each in uses if each != "on_demand"] or ["sample"]
    return name, {"roles": roles} | ({"start": "on_demand"} if "on_demand" in uses else {})


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _unknown_variables() -> dict[str, str]:
    """Return variables with our prefix that are no settings, to be refused like other unknown keys."""
    prefix = Settings.model_config["env_prefix"]
    ours = {name.removeprefix(prefix).lower(): name for name in os.environ if name.startswith(prefix)}
    return {
        key: os.environ[name]
        for key, name in ours.items()
        if key not in {*Settings.model_fields, *_SETUP_ONLY}
    }
