"""How long replicas stand still for a transport that cannot stage."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_tinker.weight_sync.sync import sync_weights
from skyrl_tinker.weight_sync.transport import Message

URL = "http://replica"


class Calls:
    """Calls of a sync in their order: those of a replica, and of its transport, which is as NCCL's."""

    server_urls = (URL,)

    def __init__(self) -> None:
        self.made: list[str] = []

    def replica(self, url: str) -> "Calls":
        return self

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def call(*args: object, **kwargs: object) -> None:
            self.made.append(name)

        return call


class Unstaged(SharedMemoryTransport):
    staged = False

    def __init__(self, calls: Calls, chunk_bytes: int) -> None:
        super().__init__(chunk_bytes)
        self._calls = calls

    async def load(self, index: int) -> Message:
        self._calls.made.append(f"load {index}")
        return await super().load(index)


async def test_replicas_do_not_stand_still_while_the_first_chunk_is_read(tmp_path: Path) -> None:
    save_file({name: torch.ones(9) for name in "ab"}, tmp_path / "model.safetensors")
    calls = Calls()
    await sync_weights(calls, Unstaged(calls, 36), tmp_path, "v1")
    loads = [index for index, name in enumerate(calls.made) if name.startswith("load")]
    updates = [index for index, name in enumerate(calls.made) if name == "update_weights"]
    pause, resume = calls.made.index("pause"), calls.made.index("resume")
    assert loads[0] < pause < updates[0] < loads[1] < updates[1] < resume


@pytest.mark.parametrize("transport", [Unstaged, SharedMemoryTransport])
async def test_nothing_cached_from_the_old_weights_outlives_them(
    transport: type[SharedMemoryTransport], tmp_path: Path
) -> None:
    """Whatever vLLM makes of `clear_cache`, which it documents to ignore."""
    save_file({"a": torch.ones(9)}, tmp_path / "model.safetensors")
    calls = Calls()
    chosen = Unstaged(calls, 36) if transport is Unstaged else transport(36)
    await sync_weights(calls, chosen, tmp_path, "v1")
    pause, reset, resume = map(calls.made.index, ("pause", "reset_prefix_cache", "resume"))
    assert pause < reset < resume
