"""Gate of one base model, before its samplers."""

import asyncio

from skyrl_tinker.errors import SamplerError


class SampleGate:
    """Samples pass while it is open. Closed, they wait, or fail where the samplers do not start."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why it is closed."""
        self._refuses = False
        self._changed = asyncio.Event()

    def close(self, reason: str, *, refuses: bool = False) -> None:
        self._set(reason, refuses=refuses)

    def open(self) -> None:
        self._set(None, refuses=False)

    async def passed(self) -> None:
        """Wait until it is open. Raises SamplerError with the reason if it refuses."""
        while self.reason is not None:
            if self._refuses:
                raise SamplerError(self.reason)
            await self._changed.wait()

    def _set(self, reason: str | None, *, refuses: bool) -> None:
        self.reason, self._refuses = reason, refuses
        self._changed.set()
        self._changed = asyncio.Event()
