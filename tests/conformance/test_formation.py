"""Groups that do not come about, and members that answer no more.

NCCL keeps a member for ever, gloo lets it go with the trainer.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import zeros

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.weight_sync import sync
from skyrl_tinker.weight_sync.chunks import WeightChunk, read_chunks
from skyrl_tinker.weight_sync.sync import sync_weights
from skyrl_tinker.weight_sync.transport import Message, WeightSource, WeightSyncError
from tests.support.waiting import PATIENCE_S


class Meeting:
    """A transport whose group is complete when nobody has failed. `held`: its members know no end."""

    backend = "nccl"
    takes_captured = False
    ways = ("nccl", "nccl")

    def __init__(self, *, held: bool) -> None:
        self.members: tuple[str, ...] = ()
        self.staged = not held
        self.left = asyncio.Event()

    async def open(self, source: WeightSource) -> Sequence[WeightChunk]:
        assert isinstance(source, Path)
        return read_chunks(source, 1000)

    async def form(self, workers: Sequence[int]) -> Sequence[Message]:
        return [{} for _ in workers]

    async def meet(self) -> None:
        await self.left.wait()
        raise SamplerError("the trainer left the group")

    async def load(self, index: int) -> Message:
        assert self.members, "there is no group"
        return {}

    send = close = meet

    async def leave(self) -> None:
        self.left.set()


class Member:
    """A replica that waits for the others, or cannot."""

    def __init__(self, meeting: Meeting, *, fails: bool, hangs: bool = False) -> None:
        self._meeting = meeting
        self._fails = fails
        self._hangs = hangs
        self.discarded = False
        self.resumed = asyncio.Event()

    async def shutdown_weight_transfer_engine(self) -> None:
        pass

    async def world_size(self) -> int:
        return 1

    async def init_weight_transfer_engine(self, info: Message) -> None:
        if self._fails:
            raise SamplerError("out of memory")
        if not self._meeting.staged:
            await asyncio.Event().wait()
        await self._meeting.meet()

    async def health(self) -> None:
        await self._answer()

    async def update_weights(self, info: Message) -> None:
        await self._answer()
        self.discarded = True

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        await self._answer()

    reset_prefix_cache = health

    async def resume(self) -> None:
        await self._answer()
        self.resumed.set()

    async def _answer(self) -> None:
        if self._hangs:
            await asyncio.Event().wait()


class Members(dict[str, Member]):
    @property
    def server_urls(self) -> list[str]:
        return list(self)

    def replica(self, url: str) -> Member:
        return self[url]


@pytest.mark.parametrize("held", [True, False], ids=["nccl", "gloo"])
async def test_who_cannot_leave_a_group_that_does_not_come_about_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Soon: it answers nobody meanwhile. Whoever can go on with the old weights does."""
    save_file({"a": zeros(1)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(sync, "STRAGGLERS_S", 0.01)
    meeting = Meeting(held=held)
    members = Members(whole=Member(meeting, fails=False), broken=Member(meeting, fails=True))
    with pytest.raises(WeightSyncError, match="init failed: broken: out of memory") as failed:
        async with asyncio.timeout(PATIENCE_S):
            await sync_weights(members, meeting, tmp_path, "v1")  # type: ignore[arg-type]
    assert failed.value.lost == (("whole",) if held else ())
    assert members["whole"].discarded is not held
    assert not meeting.members


async def test_who_does_not_pause_keeps_the_others_paused_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is replaced: each of its answers may take minutes where weights are loaded, but not here."""
    save_file({"a": zeros(1)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(sync, "STRAGGLERS_S", 0.01)
    monkeypatch.setattr(sync, "QUICK_S", 0.01)
    meeting = Meeting(held=True)
    members = Members(whole=Member(meeting, fails=False), still=Member(meeting, fails=False, hangs=True))
    meeting.members = tuple(members)
    with pytest.raises(WeightSyncError, match="pause failed: still: no answer within") as failed:
        async with asyncio.timeout(PATIENCE_S):
            await sync_weights(members, meeting, tmp_path, "v1")  # type: ignore[arg-type]
    assert failed.value.lost == ("still",)
    assert members["whole"].resumed.is_set()
