"""Scripted ends of a weight transport: the ranks' sender, and what samplers receive. The engine is real.

Every tensor of a version holds the model's steps, so that weights which are stale or mixed show in what is
drawn from them.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from skyrl_tinker.domain.weight_files import WEIGHTS_FILE
from skyrl_tinker.errors import SamplerError, TrainerError
from skyrl_tinker.inference.client.http_connection import HttpStatusError
from skyrl_tinker.weight_sync import gloo, nccl
from skyrl_tinker.weight_sync.chunks import TensorEntry, WeightChunk, cut, read_chunks
from tests.support.scripted_trainer import CapturedWeights, Steps

TENSORS = ("embed", "layers.0", "layers.1", "head")
MIXED: Steps = [[-1]]
"""Steps of weights that are no version's."""


def write_weights(directory: Path, steps: Steps | None) -> None:
    """Write the files of a version, or of the base model, which has no steps."""
    (directory / WEIGHTS_FILE).write_bytes(save(dict.fromkeys(TENSORS, _tensor(steps))))


@dataclass(frozen=True, eq=False)
class CapturedFull(CapturedWeights):
    """Full parameters that `ranks` hold."""

    ranks: Any

    def write(self, directory: Path) -> None:
        write_weights(directory, self.steps)

    async def open_in_senders(self, limit: int) -> list[Any]:
        if self.life != self.ranks.restarts:
            raise TrainerError("rank 0 died in open_captured")
        return await self.ranks.sender_call("open_captured", self, limit)

    def read(self, chunk: WeightChunk) -> bytes:
        assert self in self.kept, "taken from ranks that hold it no more"
        return b"".join(_tensor(self.steps).tobytes() for _ in chunk.entries)


class Group:
    """A sender and the samplers that met it. What it broadcasts reaches all once all take part."""

    def __init__(self, world: int, *, hangs: bool) -> None:
        """`hangs`: no member is told that another one has gone, as in NCCL."""
        self._world = world
        self._hangs = hangs
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # by rank
        self._sent: Any = None
        self._gone = False

    async def take_part(self, rank: int, content: bytes | None = None) -> Any:
        """Return what rank 0 sent, once all take part. SamplerError when one has gone."""
        waiting = self._waiting[rank] = asyncio.get_running_loop().create_future()
        if rank == 0:
            self._sent = content
        if self._gone:
            self._tell()
        elif len(self._waiting) == self._world:
            for each in self._waiting.values():
                if not each.done():
                    each.set_result(self._sent)
            self._waiting = {}
        return await waiting

    def leave(self, rank: int) -> None:
        self._gone = True
        self._end(self._waiting.pop(rank, None))
        self._tell()

    def _tell(self) -> None:
        if not self._hangs:
            for each in self._waiting.values():
                self._end(each)

    def _end(self, waiting: asyncio.Future[Any] | None) -> None:
        if waiting is not None and not waiting.done():
            waiting.set_exception(SamplerError("a member of the group has gone"))


class Sender:
    """Rank 0's end, as weight_sync.broadcast.BroadcastSender is one. `groups`: by address."""

    def __init__(self, groups: dict[str, Group], *, hangs: bool) -> None:
        self._groups = groups
        self._hangs = hangs
        self._group: Group | None = None
        self._chunks: Sequence[WeightChunk] = ()
        self._read: Callable[[Any], bytes] = _bytes
        self._loaded = b""

    async def open(self, directory: str, limit: int) -> Any:
        return self._open(read_chunks(Path(directory), limit), _bytes)

    async def open_captured(self, captured: CapturedFull, limit: int) -> Any:
        entries = [TensorEntry(name, "uint8", _tensor(captured.steps).shape, 1) for name in TENSORS]
        return self._open([WeightChunk(each) for each in cut(entries, limit)], captured.read)

    def _open(self, chunks: Sequence[WeightChunk], read: Callable[[Any], bytes]) -> Any:
        self._chunks, self._read = chunks, read
        return chunks, self._group is not None

    async def prepare(self) -> str:
        await self.leave()
        return f"meeting {len(self._groups)}"

    async def meet(self, address: str, world: int) -> None:
        self._group = self._groups.setdefault(address, Group(world, hangs=self._hangs))
        await _in_time(self._group.take_part(0))

    async def load(self, index: int) -> None:
        self._loaded = self._read(self._chunks[index])

    async def send(self) -> None:
        assert self._group is not None, "meet() comes first"
        await _in_time(self._group.take_part(0, self._loaded))

    async def close(self) -> None:
        self._chunks = ()

    async def leave(self) -> None:
        self.die()

    def die(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave(0)


class Receiver:
    """A sampler's end. `weights`: steps by tensor, None for the base model's."""

    def __init__(self, groups: dict[str, Group]) -> None:
        self._groups = groups
        self.weights: Mapping[str, Any] = dict.fromkeys(TENSORS)
        self._staged: dict[str, Any] = {}
        self._updating = False
        self._init: Mapping[str, Any] = {}
        self._group: Group | None = None

    @property
    def steps(self) -> Steps | None:
        """Return those of the weights that are served, MIXED for parts of several."""
        first, *others = self.weights.values()
        return MIXED if any(each != first for each in others) else first

    async def answer(self, path: str, body: Mapping[str, Any]) -> None:
        """Raises HttpStatusError."""
        match path:
            case "/init_weight_transfer_engine":
                await self._join(body["init_info"])
            case "/shutdown_weight_transfer_engine":
                self._require(updating=False)
                self.leave()
            case "/start_weight_update":
                self._require(updating=False)
                self._updating, self._staged = True, {}
            case "/update_weights":
                await self._update(body["update_info"])
            case "/finish_weight_update":
                self._require(updating=True)
                if self._is_staged:
                    self._require_complete(self._staged)
                    self.weights, self._staged = self._staged, {}
                self._updating = False

    def leave(self) -> None:
        """End its part in the group."""
        group, self._group = self._group, None
        if group is not None:
            group.leave(self._init["rank_offset"])

    @property
    def _is_staged(self) -> bool:
        return "transport" in self._init

    async def _join(self, init: Mapping[str, Any]) -> None:
        self._init = init
        address = init.get("meeting") or init.get("nccl_unique_id_b64")
        if address:
            group = Group(init["world_size"], hangs=not self._is_staged)
            self._group = self._groups.setdefault(address, group)
            await self._in_group(self._group)

    async def _update(self, update: Mapping[str, Any]) -> None:
        """Take a chunk; a session that fails is over."""
        self._require(updating=True)
        self._updating = False
        if update.get("discard"):
            raise HttpStatusError(500, "weight update discarded")
        received = await self._receive(update)
        if self._is_staged:
            self._staged |= received
            if update["last"]:
                self._require_complete(self._staged)
        else:
            self.weights = {**self.weights, **received}
        self._updating = True

    async def _receive(self, update: Mapping[str, Any]) -> dict[str, Any]:
        if self._group is None:
            named = zip(update["names"], update["files"], strict=True)
            directory = Path(update["directory"])
            return {name: _steps(load_file(directory / file)[name].tobytes()) for name, file in named}
        content = await self._in_group(self._group)
        sizes = [shape[0] for shape in update["shapes"]]
        ends = np.cumsum([0, *sizes])
        parts = [content[start : start + size] for start, size in zip(ends, sizes, strict=False)]
        return {name: _steps(part) for name, part in zip(update["names"], parts, strict=True)}

    async def _in_group(self, group: Group) -> Any:
        part = group.take_part(self._init["rank_offset"])
        try:
            return await (_in_time(part) if self._is_staged else part)
        except SamplerError as error:
            raise HttpStatusError(500, str(error)) from error

    def _require(self, *, updating: bool) -> None:
        if self._updating != updating:
            raise HttpStatusError(500, f"a weight update is {'not ' if updating else ''}under way")

    def _require_complete(self, staged: Mapping[str, Any]) -> None:
        if missing := set(TENSORS) - staged.keys():
            raise HttpStatusError(500, f"{len(missing)} tensors are missing from the update")


def hangs(factory: Any) -> bool:
    """Return whether members of what this sender makes hang when others go."""
    return factory is nccl.NcclSender


async def _in_time(part: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(gloo.TIMEOUT.total_seconds()):
            return await part
    except TimeoutError:
        raise SamplerError("not all members of the group took part in time") from None


def _bytes(chunk: Any) -> bytes:
    content = bytearray(chunk.size)
    chunk.read(memoryview(content))
    return bytes(content)


def _tensor(steps: Steps | None) -> Any:
    return np.frombuffer(json.dumps(steps).encode(), np.uint8)


def _steps(content: bytes) -> Any:
    return json.loads(content)
