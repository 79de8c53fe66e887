"""Choice of the sampling engine."""

from pathlib import Path
from typing import Literal, Protocol

from skyrl_tinker.inference.servers.replica_spec import EngineProcess
from skyrl_tinker.inference.sglang.sglang_process import SglangProcess
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess


class EngineSettings(Protocol):
    @property
    def sampler_engine(self) -> Literal["vllm", "sglang"]: ...
    @property
    def sampler_python(self) -> Path | None: ...


def engine_of(settings: EngineSettings) -> EngineProcess:
    return VllmProcess() if settings.sampler_engine == "vllm" else SglangProcess(settings.sampler_python)
