"""Choice of the sampling engine, and refusal of arguments for the other one."""

from pathlib import Path
from typing import Literal, Protocol

from skyrl_tinker.errors import StartupError
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
    return SglangProcess(settings.sampler_python)


def check_engine(settings: EngineSettings, urls: str) -> None:
    """Raise StartupError for arguments that no server would get, or that the engine refuses.

    `urls`: the setting of servers that run already, "" for servers of ours.
    """
    engine = engine_of(settings)
    if settings.vllm_args and urls:
        raise StartupError(f"vllm_args and {urls}: give the arguments to the servers that you start")
    if settings.vllm_args and settings.sampler_engine != "vllm":
        given = ", ".join(settings.vllm_args)
        raise StartupError(f"vllm_args: found {given}, expected none with {engine.title}")
    if not urls:
        engine.check()
