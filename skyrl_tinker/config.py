"""Settings, frozen and parsed once.

Sources, strongest first: arguments, SKYRL_TINKER_…, --config FILE.toml.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from skyrl_tinker.domain.key_limits import NAMES, KeyLimits
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.base import describe

_SETUP_ONLY = frozenset({"torch_index"})  # SKYRL_TINKER_… variables that only scripts/setup reads
_ON_CUDA = {"trainer_dtype": "bfloat16", "token_budget": 16384}
"""Defaults that device cuda changes: attention in float32 would keep matrices of [T, T], and a GPU waits for
the launches of short rows.
"""


class Settings(BaseSettings):
    """Every setting of the server. Unknown keys are refused."""

    model_config = SettingsConfigDict(
        env_prefix="SKYRL_TINKER_", extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    base_model: str = "tiny"
    """'tiny', a model directory, or a hub name"""
    model_name: str | None = None
    """Name that clients use for the base model [default: the base model as given]"""
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
    tls_cert: Path | None = None
    """Certificate chain in PEM: clients then use https://"""
    tls_key: Path | None = None
    """The certificate's private key in PEM, not encrypted"""
    insecure: bool = False
    """Allow a host that is open to the network without API keys"""
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
    standby: bool = False
    """Wait while another server works on the database (PostgreSQL), and take over once it gives no sign of
    life; checkpoints and snapshots lie where both hosts find them
    """
    engine_listen: str | None = None
    """HOST:PORT where the engine answers API processes on other hosts (skyrl-tinker api), of a private
    network [default: none]
    """
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
        description="Tokens per micro-batch and FSDP worker "
        f"[on cuda: as planned, else {_ON_CUDA['token_budget']}]",
    )
    gradient_checkpointing: bool | None = None
    """Keep only the inputs of the layers for the backward pass and compute the rest again: less memory for a
    third more work [default: in micro-batches that would not fit otherwise]
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
    replicas: int = Field(1, ge=1, le=64)
    """vLLM servers, each with a full copy of the model [on cuda: as planned]"""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """GPUs, on a CPU processes, of each replica [on cuda: as planned]"""
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
    phase_min_s: float = Field(0.2, gt=0)
    """Shortest phase when colocated"""
    phase_max_s: float = Field(10.0, gt=0)
    """Longest wait of one side while the other is busy when colocated"""
    gpu_memory_utilization: float = Field(0.85, gt=0, lt=1)
    """Share of a GPU's memory that vLLM takes, while awake"""
    weight_transport: Literal["auto", "shared_memory", "gloo", "nccl", "cuda_ipc"] = "auto"
    """Way of full parameters to the samplers; auto: by device and placement"""
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
    """vLLM's parser that reads tool calls in chat answers, as hermes for Qwen3 [default: requests with tools
    are refused]
    """
    sampler_engine: Literal["vllm", "sglang"] = "vllm"
    """Sampling engine; docs/samplers.md has the abilities of each"""
    sampler_python: Path | None = None
    """Python interpreter of the environment that has SGLang [default: the server's own]"""
    vllm_args: dict[str, JsonValue] = {}
    """A further argument of vLLM as NAME=VALUE, such as max-num-seqs=512 or enable-prefix-caching=false; give
    it once for each. A table in a file, JSON in the environment
    """
    canary: bool = True
    """Compare samplers and trainer at start; a mismatch is not served"""
    gap_probe_tokens: int = Field(32, ge=0)
    """Tokens on which samplers and trainer are compared after each sync; 0 = never"""
    logprob_gap_bound: float | None = Field(None, gt=0)
    """Difference that causes a warning, at start a refusal [default: 1e-3, for bfloat16 0.25]"""
    ray_address: str | None = None
    """Ray cluster to join, as HOST:6379 or auto; this host must be a node of it [default: one of our own on
    this host]
    """
    network_interface: str | None = None
    """Network interface of the traffic between trainer ranks, and of weights over NCCL [default: that of the
    address which Ray has for the host]
    """
    long_poll_s: float = Field(20.0, gt=0, lt=45)
    """Longest wait of a request for a result"""
    session_timeout_s: float = Field(600.0, gt=0)
    """Time without heartbeat and request after which a session's models are released"""
    request_deadline_s: float = Field(86400.0, gt=0)
    """Time after which a waiting request fails and names the reason of its wait"""
    gap_deadline_s: float = Field(900.0, gt=0)
    """Longest time that a model waits for a missing seq_id, as one of a client that is away; then that number
    counts as a failed request. The SDK tries to send one for 300 s
    """
    sample_backlog: int = Field(20000, ge=1)
    """Samples that may wait; beyond it asample and /oai answer 429 and clients try again"""
    sample_use_retrieve_futures: bool = False
    """Let SDKs from 0.27 on wait for all samples of a client on one connection"""
    sample_max_concurrent_requests: int = Field(2000, ge=1)
    """Most samples that a sampling client of the SDK has in flight"""
    sample_dispatch_bytes_semaphore_size: int = Field(10 << 20, ge=1)
    """Bytes of prompts that a client of the SDK sends at once"""
    inflight_response_bytes_semaphore_size: int = Field(50 << 20, ge=1)
    """Bytes of results that a client of the SDK fetches at once"""
    proto_compress_fwdbwd: bool = False
    """Have SDKs from 0.24 on compress bodies of forward_backward with zstd, for slow networks"""
    fwdbwd_max_chunk_len: int = Field(1024, ge=1)
    """Most datums that the SDK sends in one request; never more than max_datums"""
    fwdbwd_max_chunk_bytes_count: int = Field(5_000_000, ge=1)
    """Bytes, before compression, that the SDK sends in one forward_backward"""
    fwdbwd_dispatch_bytes_semaphore_size: int = Field(50_000_000, ge=1)
    """Bytes of forward_backward that a client of the SDK sends at once"""
    ephemeral_keep: int = Field(32, ge=1)
    """Newest unnamed sampler weights that each model keeps in any case"""
    ephemeral_idle_s: float = Field(3600.0, gt=0)
    """Time after their last sample that older unnamed sampler weights are kept"""
    ephemeral_gb: float | None = Field(None, gt=0)
    """Memory and disk that unnamed sampler weights of all models may take; beyond it the oldest go; sampling
    them then fails and asks for a new save [default: a quarter of the disk under home]
    """
    min_free_gb: float = Field(1.0, ge=0)
    """Free disk, under home and for checkpoints, below which new work is refused; accepted requests go on,
    and all resumes once there is room
    """
    replay_s: float = Field(30.0, gt=0)
    """Time that models may take to come back after a crash, once fresh trainer ranks are up; snapshots see to
    it as far as snapshot_share allows
    """
    snapshot_share: float = Field(0.02, gt=0, lt=1)
    """Share of the trainer's time that snapshots for such a return may take"""
    result_ttl_s: float = Field(86400.0, gt=0)
    """Time that results are kept; twice that the records of ended requests"""
    history_ttl_s: float = Field(7776000.0, gt=0)
    """Time that usage, audit events, removed checkpoints and ended sessions are listed"""
    stability_ttl_s: float = Field(86400.0, gt=0)
    """Time that the record of a sample is kept after its last use"""
    log_mb: int = Field(64, ge=1)
    """Largest size of a log file; two older ones are kept of each"""
    otlp_endpoint: str | None = None
    """OpenTelemetry collector, as http://localhost:4318, that gets a trace of each request by OTLP over HTTP;
    needs the extra otlp [default: none]
    """
    key_models: int | None = Field(None, ge=0)
    """Models in training that one API key may have [default: any number]"""
    key_resident_gb: float | None = Field(None, ge=0)
    """State (weights, gradients, moments) of the models in training of one API key [default: any amount]"""
    key_stored_gb: float | None = Field(None, ge=0)
    """Checkpoints of one API key; beyond it saves fail [default: any amount]"""
    key_sessions: int | None = Field(None, ge=0)
    """Open sessions of one API key [default: any number, with several keys 1000]"""
    key_backlog: int | None = Field(None, ge=1)
    """Waiting requests of one API key; beyond it new ones are answered with 429 and the SDK tries again
    [default: any number, with several keys 10000]
    """
    key_requests_per_s: float | None = Field(None, gt=0)
    """Requests per second of one API key, on average over ten seconds, without those that wait for results;
    beyond it 429 [default: any number]
    """
    key_metadata_kb: float | None = Field(None, ge=0)
    """Metadata, tags and names in one request, as JSON [default: 256, with several keys 16]"""
    key_stop_kb: float | None = Field(64, ge=0)
    """Stop strings of one sample"""
    trust_forwarded: bool = False
    """Make download URLs from X-Forwarded-Proto, -Host and -Prefix, where a proxy sets them"""
    metrics_key: bool = False
    """Have /metrics ask for an admin key, and then also count requests and tokens by owner"""
    max_connections: int = Field(10_000, ge=1)
    """Connections at once; beyond it new ones get 503 and are closed"""
    max_connections_per_address: int = Field(5_000, ge=1)
    """Connections at once from one address, which for a proxy's clients is its own; beside others fewer, so
    that newcomers find some
    """
    wire_body_mb: int = Field(64, ge=1)
    """Largest body of a pass as sent, in protobuf"""
    expanded_body_mb: int = Field(64, ge=1)
    """Largest body of a pass after decompression"""
    json_body_mb: int = Field(16, ge=1)
    """Largest other body, as sent and after decompression"""
    held_bodies_mb: int = Field(32, ge=1)
    """Large request bodies held at once, as sent; as much again expanded"""
    max_datums: int = Field(4096, ge=1)
    """Most datums of a forward_backward"""
    custom_loss_server_side: bool = True
    """Run the losses of create_custom_loss on the server, not on the client"""

    @field_validator("engine_listen")
    @classmethod
    def _check_address(cls, given: str | None) -> str | None:
        if given is not None:
            _split_address(given)
        return given

    @field_validator("tls_cert", "tls_key", "sampler_python")
    @classmethod
    def _make_absolute(cls, given: Path | None) -> Path | None:
        """Commands and actors use them, too, from other directories."""
        return given and given.absolute()

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _read_place(cls, given: object) -> object:
        return str(given) if isinstance(given, Path) else given

    @field_validator("vllm_args", mode="before")
    @classmethod
    def _read_pairs(cls, given: object) -> object:
        """Read texts NAME=VALUE, as on the command line: JSON where it is such; a name alone is true."""
        if not isinstance(given, list | tuple):
            return given
        split = [str(text).partition("=") for text in given]
        return {name: _json_or_text(value) if equals else True for name, equals, value in split}

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

    @model_validator(mode="after")
    def _change_defaults(self) -> Self:
        """Change them past pydantic, so that model_fields_set still names the given ones alone."""
        if self.device == "cuda":
            unset = _ON_CUDA.keys() - self.model_fields_set
            self.__dict__.update({name: _ON_CUDA[name] for name in unset})
        return self

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
    def external_urls(self) -> tuple[str, ...]:
        """URLs of servers that are not ours, those that decode first."""
        return self.sampler_urls + self.decode_urls + self.prefill_urls

    @property
    def key_limits(self) -> KeyLimits:
        """Limits of every key that has none of its own, as they are set."""
        return KeyLimits(**{name: getattr(self, f"key_{name}") for name in NAMES})

    def api_share(self, value: int) -> int:
        """Return the part of one API process in a limit of all on this host."""
        return -(-value // self.api_processes)

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{self.root / 'skyrl-tinker.db'}"

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


FORMER = {
    "router_policy",
    "sampler_hang_s",
    "sampler_startup_s",
    "sampler_step_s",
    "trainer_threads",
    "unit_ms",
    "weight_chunk_mb",
}
"""Names that were settings."""


def load(config: Path | None = None, **overrides: Any) -> Settings:
    """Parse the settings. Overrides that are None count as not given; model_fields_set names the given ones.

    Raises pydantic.ValidationError that names the unknown key or the bad value.
    """
    overridden = _unknown_variables() | {key: value for key, value in overrides.items() if value is not None}

    class _FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=config)

    return Settings.model_validate(_FromFile(**overridden).model_dump(exclude_unset=True))


def description_of(field: FieldInfo) -> str:
    """Return the description in one line."""
    return " ".join((field.description or "").split())


def successor(name: str) -> str:
    """Return the remedy for a name that was a setting, "" for any other."""
    return "no setting any more" if name in FORMER else ""


def limit_changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a key's limits, by name: "none" is None, "default" that of all keys.

    Raises UserError that names a wrong limit.
    """
    if unknown := sorted(given.keys() - set(NAMES)):
        raise UserError(f"limits: found {unknown[0]!r}, expected any of {', '.join(NAMES)}")
    words = {"none": None, "default": "default"}
    numbers = {f"key_{name}": value for name, value in given.items() if value not in words}
    try:
        read = Settings.model_validate(numbers)
    except ValidationError as error:
        raise UserError(describe(error.errors(include_url=False))) from error
    return {
        name: words[value] if value in words else getattr(read, f"key_{name}")
        for name, value in given.items()
    }


def _split_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("expected HOST:PORT")
    return host, int(port)


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
