"""The vLLM side of our transports. Imported by vLLM's workers only.

`update` stages and checks, `finish` applies in one call between two forward steps. So a failed update leaves
the old weights serving, and no forward meets a half-loaded model (loading puts it on the meta device).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import reload

TIED_HEAD = "lm_head.weight"  # a tied checkpoint may or may not name it


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    pass


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """`path`: a safetensors file; `last`: the set is complete with it; `discard`: forget what is staged."""

    path: str = ""
    last: bool = False
    discard: bool = False


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        self.shapes = _shapes(Path(self.model_config.model))
        self.staged: dict[str, Any] = {}

    def start_weight_update(self) -> None:
        self.staged = {}

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """ValueError for a tensor that the model lacks or that is missing; vLLM then ends the session."""
        if update_info.discard:
            self.staged = {}
            raise ValueError("weight update discarded")
        chunk: Any = safe_open(update_info.path, "pt")  # mapped, not read: no second copy of the weights
        for name in chunk.keys():  # noqa: SIM118 (not a dict)
            self._check(name, chunk.get_slice(name).get_shape())
            self.staged[name] = chunk
        if update_info.last:
            self._check_complete()

    def finish_weight_update(self) -> None:
        """Load what is staged. A failure past the checks leaves a broken model, so it ends the process."""
        self._check_complete()
        staged, self.staged = self.staged, {}
        try:
            reload.initialize_layerwise_reload(self.model)
            self.model.load_weights(_tensors(staged))  # type: ignore[operator]
            reload.finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise SystemExit(f"weights could not be loaded, the model is unusable: {error!r}") from error

    def shutdown(self) -> None:
        self.staged = {}

    def _check(self, name: str, shape: list[int]) -> None:
        if name == TIED_HEAD and self._tied:
            return
        expected = self.shapes.get(name)
        if shape != expected:
            raise ValueError(f"tensor {name}: expected shape {expected}, found {shape}")

    def _check_complete(self) -> None:
        """Part of a fused layer would fill the rest with garbage, so only complete sets are taken."""
        missing = self.shapes.keys() - self.staged.keys()
        if self._tied:
            missing -= {TIED_HEAD}
        if missing:
            raise ValueError(f"{len(missing)} tensors are missing from the update, first {min(missing)}")

    @property
    def _tied(self) -> bool:
        return bool(self.model_config.hf_config.tie_word_embeddings)


def _shapes(directory: Path) -> dict[str, list[int]]:
    """Name and shape of every tensor in the checkpoint that the server was started from."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as chunk:
            shapes |= {name: chunk.get_slice(name).get_shape() for name in chunk.keys()}  # noqa: SIM118
    return shapes


def _tensors(staged: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, chunk in staged.items():
        yield name, chunk.get_tensor(name)
