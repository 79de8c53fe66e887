"""One frozen settings tree, parsed once.

Sources, strongest first: arguments, SKYRL_TINKER_…, --config FILE.toml.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

MiB = 1 << 20


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
    unit_tokens: int = Field(16384, ge=1, description="tokens that one unit of work takes from all lanes")
    max_lora_rank: int = Field(64, ge=1, le=512)
    context_length: int | None = Field(None, ge=2, description="default: the model's, at most 4096")

    replicas: int = Field(1, ge=1)
    placement: Literal["separate", "colocated"] = "separate"
    max_loras: int = Field(8, ge=1)
    max_cpu_loras: int = Field(32, ge=1)
    sample_concurrency: int = Field(512, ge=1)
    sampler_startup_s: float = Field(300.0, gt=0)
    canary: bool = True
    ray_address: str | None = None

    long_poll_s: float = Field(20.0, gt=0, lt=45)
    session_timeout_s: float = Field(600.0, gt=0)
    result_ttl_s: float = Field(86400.0, gt=0)
    wire_body_mb: int = Field(64, ge=1)
    expanded_body_mb: int = Field(256, ge=1)
    max_datums: int = Field(4096, ge=1)

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
    given = {key: value for key, value in overrides.items() if value is not None}

    class _FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=config)

    return Settings.model_validate(_FromFile(**given).model_dump())
