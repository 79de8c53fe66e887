"""Choice of the sampling engine."""

from pathlib import Path
from typing import Literal, Protocol

from skyrl_tinker.inference.servers.replica_spec import Arguments, EngineProcess
from skyrl_tinker.inference.sglang.sglang_process import SglangProcess
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess


class EngineSettings(Protocol):
    @property
    def sampler_engine(self) -> Literal["vllm", "sglang"]: ...
    @property
    def vllm_args(self) -> Arguments: ...
    @property
    def sampler_python(self) -> Path | None: ...


def engine_of(settings: EngineSettings) -> EngineProcess:
    if settings.sampler_engine == "vllm":
        return VllmProcess(settings.vllm_args)
    return SglangProcess(settings.sampler_python, settings.vllm_args)
