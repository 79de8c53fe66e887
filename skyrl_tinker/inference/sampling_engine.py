"""The sampling engine: the one place that chooses it."""

from skyrl_tinker.inference.servers.replica_spec import EngineProcess
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess

ENGINE: EngineProcess = VllmProcess()
