"""LRU cache of model state on the device: a limited number of LoRA models, the rest in host memory."""

from collections.abc import Iterable, Mapping

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.training.memory.offload import OffloadBuffer
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.trainable_model import TrainableModel


class DeviceCache:
    """Cache of one rank. Full-parameter models always stay on the device."""

    def __init__(self, models: Mapping[ModelKey, TrainableModel], limit: int) -> None:
        """`models`: the worker's table, which it goes on changing. `limit`: LoRA models; 0 = unlimited."""
        self._models = models
        self._limit = limit
        self._buffers: dict[ModelKey, OffloadBuffer] = {}
        self._loaded: dict[ModelKey, None] = {}  # LoRA models on the device, least recently used first

    def add(self, key: ModelKey) -> None:
        """Add a new model, which is on the device."""
        self._buffers[key] = OffloadBuffer()
        self._evict_for([key])
        self._touch(key)

    def remove(self, key: ModelKey) -> None:
        self._buffers.pop(key, None)
        self._loaded.pop(key, None)

    def load(self, keys: Iterable[ModelKey]) -> None:
        """Load these models onto the device, all of them, even if they exceed the limit."""
        known = [key for key in dict.fromkeys(keys) if key in self._models]
        self._evict_for(known)
        for key in known:
            if self._is_offloaded(key):
                self._buffers[key].onload()
            self._touch(key)

    def mark_changed(self, keys: Iterable[ModelKey]) -> None:
        """Invalidate the host copies of models that are on the device and about to change."""
        for key in keys:
            if key in self._buffers:
                self._buffers[key].forget()

    def clear_gradients(self, keys: Iterable[ModelKey], *, all_offloaded: bool) -> None:
        """Clear gradients where they are, on the device or not, which takes no memory.

        `all_offloaded`: none are on the device, as after `offload`.
        """
        for key in keys:
            model, buffer = self._models[key], self._buffers[key]
            if all_offloaded or self._is_offloaded(key):
                model.has_gradients = False
                buffer.blank(model.blanks())
            else:
                buffer.forget()
                model.clear_gradients()

    def offload(self) -> None:
        """Offload all models; `onload` restores those that were on the device."""
        for key in self._models:
            self._offload(key)

    def onload(self) -> None:
        for key in self._models:
            if not self._is_offloaded(key):
                self._buffers[key].onload()

    def _evict_for(self, coming: Iterable[ModelKey]) -> None:
        adapters = [key for key in coming if isinstance(self._models[key], LoraModel)]
        others = [key for key in self._loaded if key not in adapters]
        if self._limit:
            for key in others[: max(0, len(others) + len(adapters) - self._limit)]:
                self._offload(key)
                del self._loaded[key]

    def _touch(self, key: ModelKey) -> None:
        if isinstance(self._models[key], LoraModel):
            self._loaded.pop(key, None)
            self._loaded[key] = None

    def _is_offloaded(self, key: ModelKey) -> bool:
        return isinstance(self._models[key], LoraModel) and key not in self._loaded

    def _offload(self, key: ModelKey) -> None:
        model = self._models[key]
        self._buffers[key].offload(model.tensors(), model.blanks())
