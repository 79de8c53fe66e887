"""Full parameters to samplers on the same host: files in tmpfs, of which only the paths travel."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.weight_sync.base import Message

BACKEND = "skyrl_shared_memory"
"""Under this name `vllm_engine.SharedMemoryEngine` is registered in vLLM."""


@dataclass(frozen=True, slots=True)
class SharedMemoryTransport:
    """A chunk is one safetensors file of complete tensors under Hugging Face names.

    The files must not change once named; they may be removed when the sync is over. The base model's own
    directory is a valid source, to go back to the base.
    """

    backend: str = BACKEND

    @property
    def init_info(self) -> Message:
        return {}

    def updates(self, directory: Path) -> Sequence[Message]:
        files = sorted(directory.absolute().glob("*.safetensors"))
        if not files:
            raise SamplerError(f"{directory} holds no *.safetensors, so there are no weights to serve")
        return [{"path": str(file), "last": file is files[-1]} for file in files]

    @property
    def discard(self) -> Message:
        return {"discard": True}
