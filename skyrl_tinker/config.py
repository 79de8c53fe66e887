"""One frozen settings tree, parsed once.

Sources, strongest first: arguments, SKYRL_TINKER_…, --config FILE.toml.
"""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

_OTHERS = frozenset({"torch_index"})  # SKYRL_TINKER_… variables that only scripts/setup reads


class Settings(BaseSettings):
    """Every setting of the server. Unknown keys are refused."""

    model_config = SettingsConfigDict(
        env_prefix="SKYRL_TINKER_", extra="forbid", frozen=True, protected_namespaces=()
    )

    base_model: str = Field("tiny", description="'tiny', a model directory, or a hub name")
    model_name: str | None = Field(None, description="name clients use; default: the base model as given")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    insecure: bool = Field(False, description="allow a non-loopback host without API keys")
    home: Path = Path(".skyrl-tinker")
    database_url: str | None = Field(None, description="SQLAlchemy URL; default: SQLite under home")
    checkpoints: Path | None = Field(None, description="default: <home>/checkpoints")

    device: Literal["cpu", "cuda"] = "cpu"
    trainer_ranks: int = Field(1, ge=1, le=64)
    trainer_dtype: Literal["float32", "bfloat16"] = "float32"
    trainer_threads: int = Field(1, ge=1, description="torch threads per rank on CPU")
    token_budget: int = Field(2048, ge=1, description="tokens per micro-batch and rank")
    gradient_checkpointing: bool = Field(
        False, description="run layers twice, and keep only their inputs for the backward pass"
    )
    resident_models: int = Field(
        0, ge=0, description="LoRA models on the trainer's devices at once, others wait on the host; 0 = all"
    )
    trainer_memory_gb: float | None = Field(
        None,
        gt=0,
        description="what models may hold per trainer rank; above it no full-parameter model is made; "
        "default: what the machine has",
    )
    unit_tokens: int = Field(16384, ge=1, description="tokens that one unit of work takes from all lanes")
    max_lora_rank: int = Field(64, ge=1, le=512)
    context_length: int | None = Field(None, ge=2, description="default: the model's, at most 4096")

    replicas: int = Field(1, ge=1, le=64, description="vLLM servers, each a full copy of the model")
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="GPUs, on a CPU processes, of each replica")
    sampler_urls: tuple[str, ...] = Field(
        (),
        description="vLLM servers that run already, in place of replicas; they see our files under our paths",
    )
    router_url: str | None = Field(None, description="a router before sampler_urls; default: one of our own")
    router_policy: Literal[
        "consistent_hash", "sticky_least_loaded", "round_robin", "random", "cache_aware"
    ] = Field("consistent_hash", description="of vllm-router, which runs before several replicas")
    placement: Literal["separate", "colocated"] = Field(
        "separate", description="colocated: trainer and samplers take turns on the same devices"
    )
    phase_min_s: float = Field(0.2, gt=0, description="colocated: shortest turn")
    phase_max_s: float = Field(
        10.0, gt=0, description="colocated: how long one side waits at most while the other is busy"
    )
    gpu_memory_utilization: float = Field(
        0.85, gt=0, lt=1, description="share of a GPU's memory that vLLM takes, while awake"
    )
    weight_transport: Literal["auto", "shared_memory", "gloo", "nccl", "cuda_ipc"] = Field(
        "auto", description="how full parameters reach the samplers; auto: by device and placement"
    )
    weight_chunk_mb: int = Field(256, ge=1, description="sent at once; so much memory the sender takes")
    max_loras: int = Field(8, ge=1)
    max_cpu_loras: int = Field(32, ge=1)
    sample_concurrency: int = Field(512, ge=1, description="most samples in flight per replica")
    sampler_startup_s: float = Field(300.0, gt=0)
    sampler_hang_s: float = Field(10.0, gt=0, description="silence after which a replica counts as dead")
    canary: bool = True
    gap_probe_tokens: int = Field(
        32, ge=0, description="tokens on which samplers and trainer are compared after each sync; 0 = never"
    )
    logprob_gap_bound: float | None = Field(
        None, gt=0, description="above it a warning; default: 1e-3, for bfloat16 0.25"
    )
    ray_address: str | None = None

    long_poll_s: float = Field(20.0, gt=0, lt=45)
    session_timeout_s: float = Field(600.0, gt=0)
    request_deadline_s: float = Field(
        86400.0, gt=0, description="a request that has waited so long fails, and says what it waited for"
    )
    gap_deadline_s: float = Field(
        900.0,
        gt=0,
        description="how long a model waits for a seq_id that is missing after the last request came; "
        "then all its requests fail. The SDK tries to send one for 300 s",
    )
    sample_backlog: int = Field(
        20000, ge=1, description="samples that may wait; above it asample answers 429 and the SDK comes again"
    )
    sample_use_retrieve_futures: bool = Field(
        False, description="tell SDKs from 0.27 on to wait for all samples of a client on one connection"
    )
    result_ttl_s: float = Field(86400.0, gt=0)
    stability_ttl_s: float = Field(
        86400.0, gt=0, description="how long what was recorded of a sample lasts after its last use"
    )
    trust_forwarded: bool = Field(
        False,
        description="make download URLs of X-Forwarded-Proto, -Host and -Prefix: where a proxy sets them",
    )
    wire_body_mb: int = Field(64, ge=1)
    expanded_body_mb: int = Field(256, ge=1)
    held_bodies_mb: int = Field(
        64, ge=1, description="large request bodies held at once, as they come; as much again expanded"
    )
    max_datums: int = Field(4096, ge=1)
    custom_loss_server_side: bool = Field(
        True, description="run the losses that clients make with create_custom_loss here, not on the client"
    )

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

    @property
    def root(self) -> Path:
        return self.home.absolute()

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.root / 'skyrl-tinker.db'}"

    @property
    def checkpoint_root(self) -> Path:
        return (self.checkpoints or self.root / "checkpoints").absolute()


def load(config: Path | None = None, **overrides: Any) -> Settings:
    """Parse settings once. Overrides that are None count as not given.

    Raises pydantic.ValidationError that names the unknown key or the bad value.
    """
    given = _misspelt() | {key: value for key, value in overrides.items() if value is not None}

    class _FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=config)

    return Settings.model_validate(_FromFile(**given).model_dump())


def _misspelt() -> dict[str, str]:
    """Variables with our prefix that are no settings; they are refused like any other unknown key."""
    prefix = Settings.model_config["env_prefix"]
    ours = {name.removeprefix(prefix).lower(): name for name in os.environ if name.startswith(prefix)}
    return {
        key: os.environ[name] for key, name in ours.items() if key not in {*Settings.model_fields, *_OTHERS}
    }
