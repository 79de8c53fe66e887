"""vLLM's side of our own transports. Imported by vLLM's workers only.

`update` stages and checks, `finish` applies in one call between two forward steps. So after a failed update
the old weights still serve, and no step runs on a half-loaded model (loading puts it on the meta device).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from skyrl_tinker.weight_sync import gloo, shared_memory
from skyrl_tinker.weight_sync.chunks import read_chunks

TIED_HEAD = "lm_head.weight"  # a tied checkpoint may or may not name it
Staged = Mapping[str, Callable[[], torch.Tensor]]
"""Name -> function that returns the tensor."""


@dataclass
class StagedInit(WeightTransferInitInfo):
    """Init message. `transport`: shared_memory or gloo; other fields: meeting and ranks of gloo's group."""

    transport: str
    meeting: str = ""
    rank_offset: int = 0
    world_size: int = 0


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """One chunk. `last`: it completes the set; `discard`: drop all staged tensors.

    shared_memory names a directory, and a file in it per tensor; gloo the dtypes, and the sizes in bytes
    within the broadcast buffer.
    """

    names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    directory: str = ""
    files: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    last: bool = False
    discard: bool = False


class Receiver(Protocol):
    def receive(self, update: StagedUpdate) -> Staged: ...
    def forget(self) -> None: ...


class StagedEngine(WeightTransferEngine[StagedInit, StagedUpdate]):
    init_info_cls = StagedInit
    update_info_cls = StagedUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        self.shapes = _shapes(Path(self.model_config.model))
        self.receiver = self._receiver(init_info)
        self.staged: dict[str, Callable[[], torch.Tensor]] = {}

    def start_weight_update(self) -> None:
        self._forget()

    def receive_weights(self, update_info: StagedUpdate) -> None:
        """Stage a chunk. Raises ValueError for an unknown or missing tensor; vLLM then ends the session."""
        if update_info.discard:
            self._forget()
            raise ValueError("weight update discarded")
        received = self.receiver.receive(update_info)
        for name, shape in zip(update_info.names, update_info.shapes, strict=True):
            self._check(name, shape)
        self.staged |= received
        if update_info.last:
            self._check_complete()

    def finish_weight_update(self) -> None:
        """Load the staged tensors. A failure past the checks leaves a broken model and ends the process."""
        from vllm.model_executor.model_loader import reload  # imports vLLM's layers, as workers have

        self._check_complete()
        try:
            reload.initialize_layerwise_reload(self.model)
            self.model.load_weights(_consumed(self.staged))  # type: ignore[operator]
            reload.finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        except Exception as error:  # of any kind: some layers are new, others old
            raise SystemExit(f"weights could not be loaded, the model is unusable: {error!r}") from error
        self._forget()

    def shutdown(self) -> None:
        self.__dict__.pop("receiver", None)
        self.staged = {}

    def _receiver(self, info: StagedInit) -> Receiver:
        if info.transport == shared_memory.NAME:
            return shared_memory.MappedFiles()
        if info.transport != gloo.NAME:
            raise ValueError(f"transport: expected shared_memory or gloo, found {info.transport}")
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return gloo.GlooReceiver(info.meeting, info.rank_offset + worker, info.world_size)

    def _forget(self) -> None:
        self.staged = {}
        self.receiver.forget()

    def _check(self, name: str, shape: list[int]) -> None:
        if name == TIED_HEAD and self._tied:
            return
        expected = self.shapes.get(name)
        if shape != expected:
            raise ValueError(f"tensor {name}: expected shape {expected}, found {shape}")

    def _check_complete(self) -> None:
        """Accept complete sets only: part of a fused layer would fill the rest with garbage."""
        missing = self.shapes.keys() - self.staged.keys()
        if self._tied:
            missing -= {TIED_HEAD}
        if missing:
            raise ValueError(f"{len(missing)} tensors are missing from the update, first {min(missing)}")

    @property
    def _tied(self) -> bool:
        return bool(self.model_config.hf_config.tie_word_embeddings)


def _shapes(directory: Path) -> dict[str, list[int]]:
    """Read name and shape of every tensor in the checkpoint that the server was started from."""
    chunks = read_chunks(directory, limit=1)
    return {entry.name: list(entry.shape) for chunk in chunks for entry in chunk.entries}


def _consumed(staged: dict[str, Callable[[], torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors; each is released before the next is made."""
    for name in list(staged):
        yield name, staged.pop(name)()
