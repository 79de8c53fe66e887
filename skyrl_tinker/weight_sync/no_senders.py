"""Senders of a base model without a trainer: full parameters come from files, or not at all."""

from collections.abc import Callable
from typing import Any, NoReturn

from skyrl_tinker.errors import NotSupportedError


class NoSenders:
    """Raises NotSupportedError when a transport needs the ranks of a trainer."""

    restarts = 0

    def __init__(self, base_model: str) -> None:
        self._base_model = base_model

    async def open_sender(self, factory: Callable[[int], Any]) -> None:
        self._refuse()

    async def sender_call(self, method: str, *args: Any) -> list[Any]:
        self._refuse()

    async def root_call(self, method: str, *args: Any) -> Any:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotSupportedError(
            f"full parameters of base model {self._base_model!r} cannot be sampled: it is served for sampling"
            " only, and their transport (setting weight_transport) needs the ranks of its trainer"
        )
