"""All settings of a server, frozen."""

from itertools import chain, pairwise
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from skyrl_tinker.config.setting_tables import (
    BaseOverrides,
    Bodies,
    ConnectionLimits,
    EphemeralWeights,
    Parity,
    Phases,
    Recovery,
    Retention,
    SamplerEngine,
    Timeouts,
    absolute,
)
from skyrl_tinker.protocol.schemas.base import fit_json
from skyrl_tinker.protocol.schemas.session import SdkFlags
from skyrl_tinker.protocol.validation.key_limits import KeyLimits

_ON_CUDA = {"trainer_dtype": "bfloat16", "token_budget": 16384}
"""Defaults that device cuda changes: attention in float32 would keep matrices of [T, T], and a GPU waits for
the launches of short rows.
"""


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
    _make_absolute = field_validator("tls_cert", "tls_key", "sampler_python")(absolute)

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
    max_lora_rank: int = Field(64, ge=0, le=512)
    """Highest LoRA rank that a client may choose; 0 (--full): full parameters only, no adapters to sample"""
    context_length: int | None = Field(None, ge=2)
    """Most prompt and generated tokens of a sequence [default: the model's, at most 4096]"""
    recovery: Recovery = Recovery()

    sampler_engine: SamplerEngine = "vllm"
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
    wait for their turns; sessions that have none there get more. Default: 256, on a CPU 96, or 384 of one
    session that is alone
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
        own = self.bases.get(self.for_base(name).base_model)
        return self.timeouts.base_idle_s if own and own.start == "on_demand" else None

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


def _split_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("expected HOST:PORT")
    return host, int(port)
