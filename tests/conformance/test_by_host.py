"""One sync reaches a replica of this host by shared memory, and one of another by gloo."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from skyrl_tinker.errors import TrainerError
from skyrl_tinker.weight_sync.by_host import ByHostTransport
from skyrl_tinker.weight_sync.gloo import GlooTransport
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from tests.conformance.support.ends import Gloo, Mapped, Tensors, ThreadSenders, as_json

LIMIT = 1000
REPLICAS = ("here", "elsewhere")


class Ranks(ThreadSenders):
    """Ranks that may be down."""

    down = False

    async def root_call(self, method: str, *args: Any) -> Any:
        if self.down:
            raise TrainerError("rank 0 died")
        return await super().root_call(method, *args)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(1)


@pytest.fixture
def transport(ranks: Ranks) -> ByHostTransport:
    parts = SharedMemoryTransport(LIMIT), GlooTransport(ranks, LIMIT)
    return ByHostTransport(*parts, is_near=lambda url: url == "here")


@pytest.fixture
def written(tmp_path: Path) -> Tensors:
    tensors = {f"t{i}": torch.full((200,), float(i)) for i in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


async def arrive(transport: ByHostTransport, source: Path, *receivers: Mapped | Gloo) -> list[Tensors]:
    """Send a version to both replicas as `sync_weights` does; return what arrives at each."""
    chunks = await transport.open(source, REPLICAS)
    if transport.members != REPLICAS:
        inits = await transport.form([1, 1])
        joins = [
            asyncio.to_thread(receiver.join, as_json(init))
            for receiver, init in zip(receivers, inits, strict=True)
        ]
        await asyncio.gather(transport.meet(), *joins)
        transport.members = REPLICAS
    arrived: list[Tensors] = [{} for _ in receivers]
    for index in range(len(chunks)):
        updates = await transport.load(index)
        receives = [
            asyncio.to_thread(receiver.receive, as_json(update))
            for receiver, update in zip(receivers, updates, strict=True)
        ]
        _, *received = await asyncio.gather(transport.send(), *receives)
        for tensors, part in zip(arrived, received, strict=True):
            tensors |= {name: tensor.clone() for name, tensor in part.items()}
    await transport.close()
    return arrived


def assert_same(arrived: list[Tensors], written: Tensors) -> None:
    for tensors in arrived:
        assert tensors.keys() == written.keys()
        assert all(torch.equal(tensors[name], written[name]) for name in written)


async def test_each_replica_gets_all_tensors_by_the_way_of_its_host(
    transport: ByHostTransport, written: Tensors, tmp_path: Path
) -> None:
    receivers = Mapped(), Gloo()
    for _ in range(2):  # the second time in the same group
        assert_same(await arrive(transport, tmp_path, *receivers), written)
    await transport.leave()


async def test_a_replica_elsewhere_is_given_the_files_while_the_trainer_is_down(
    transport: ByHostTransport, ranks: Ranks, written: Tensors, tmp_path: Path
) -> None:
    for down in (False, True, False):
        ranks.down = down
        elsewhere = Mapped() if down else Gloo()
        assert_same(await arrive(transport, tmp_path, Mapped(), elsewhere), written)
    await transport.leave()


async def test_without_replicas_elsewhere_the_trainer_does_nothing(
    transport: ByHostTransport, ranks: Ranks, written: Tensors, tmp_path: Path
) -> None:
    await transport.open(tmp_path, ("here",))
    await transport.form([2])
    await transport.load(0)
    await transport.close()
    await transport.leave()
    assert ranks.senders == []
