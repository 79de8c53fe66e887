"""Whose state is on the device: of LoRA models at most so many, the rest waits in host memory."""

from collections.abc import Iterable, Mapping

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.training.memory.offload import OffloadBuffer
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.trainable_model import TrainableModel


class DeviceCache:
    """Each rank has its own. Full-parameter models always stay."""

    def __init__(self, models: Mapping[ModelKey, TrainableModel], limit: int) -> None:
        """`models` is the worker's own table and changes under it; limit 0 = none."""
        self._models = models
        self._limit = limit
        self._asides: dict[ModelKey, OffloadBuffer] = {}
        self._here: dict[ModelKey, None] = {}  # LoRA models on the device, the longest unused first

    def add(self, key: ModelKey) -> None:
        """A model just made, on the device."""
        self._asides[key] = OffloadBuffer()
        self._make_room([key])
        self._touch(key)

    def drop(self, key: ModelKey) -> None:
        self._asides.pop(key, None)
        self._here.pop(key, None)

    def use(self, keys: Iterable[ModelKey]) -> None:
        """Have these on the device, all of them, even if they are more than the limit."""
        known = [key for key in dict.fromkeys(keys) if key in self._models]
        self._make_room(known)
        for key in known:
            if self._is_away(key):
                self._asides[key].onload()
            self._touch(key)

    def change(self, keys: Iterable[ModelKey]) -> None:
        """These are on the device and change now: what the host has of them is old."""
        for key in keys:
            if key in self._asides:
                self._asides[key].forget()

    def offload(self) -> None:
        """Set all aside; `onload` brings back those that were here."""
        for key in self._models:
            self._set_aside(key)

    def onload(self) -> None:
        for key in self._models:
            if not self._is_away(key):
                self._asides[key].onload()

    def _make_room(self, coming: Iterable[ModelKey]) -> None:
        adapters = [key for key in coming if isinstance(self._models[key], LoraModel)]
        others = [key for key in self._here if key not in adapters]
        if self._limit:
            for key in others[: max(0, len(others) + len(adapters) - self._limit)]:
                self._set_aside(key)
                del self._here[key]

    def _touch(self, key: ModelKey) -> None:
        if isinstance(self._models[key], LoraModel):
            self._here.pop(key, None)
            self._here[key] = None

    def _is_away(self, key: ModelKey) -> bool:
        return isinstance(self._models[key], LoraModel) and key not in self._here

    def _set_aside(self, key: ModelKey) -> None:
        model = self._models[key]
        self._asides[key].offload(model.tensors(), model.blanks())
