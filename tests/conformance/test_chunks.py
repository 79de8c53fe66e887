"""Every transport carries the same tensors, cut in the same places, to the last bit."""

import asyncio
import base64
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from skyrl_tinker.errors import SamplerError, StartupError, TrainerError
from skyrl_tinker.training.checkpoints.tensor_files import write_tensors
from skyrl_tinker.training.weight_share import WeightShare
from skyrl_tinker.weight_sync import factory, nccl
from skyrl_tinker.weight_sync.broadcast import BroadcastSender, BroadcastTransport
from skyrl_tinker.weight_sync.captured_chunks import CapturedSource
from skyrl_tinker.weight_sync.chunk_buffer import ChunkBuffer, ChunkSource, FileSource
from skyrl_tinker.weight_sync.chunks import read_chunks
from skyrl_tinker.weight_sync.factory import TransportName, choose, make_transport
from skyrl_tinker.weight_sync.gloo import open_port
from skyrl_tinker.weight_sync.nccl import NcclSender
from skyrl_tinker.weight_sync.torch_groups import GROUP, TorchNcclSender
from tests.conformance.support.ends import HeldByThreads, Tensors, ThreadSenders, carry, ends, size_of
from tests.support.shards import write_index
from tests.support.waiting import PATIENCE_S, until

TRANSPORTS = ("shared_memory", "gloo", "torch_gloo", "nccl", "cuda_ipc")
LIMIT = 1000


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def floats(count: int) -> Tensor:
    return values(torch.float32, count)


def ragged() -> list[Tensors]:
    """Elements of any size in any order, of odd counts: nothing lies aligned by luck."""
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.int8)
    first = {f"a{i}": values(dtypes[i % 5], 3 + 2 * i, 7, seed=i) for i in range(10)}
    return [first, {f"b{i}": values(dtypes[(i + 1) % 5], 1 + i, seed=i) for i in range(10)}]


CASES: dict[str, Callable[[], list[Tensors]]] = {
    "ragged": ragged,
    "all in one": lambda: [{"a": floats(3), "b": floats(4)}],
    "huge among tiny": lambda: [{"a": floats(2), "b": floats(1000), "c": floats(2), "d": floats(1)}],
    "huge alone": lambda: [{"a": floats(251)}],
    "to the last byte": lambda: [{"a": floats(125), "b": floats(125), "c": floats(250), "d": floats(1)}],
    "one byte over": lambda: [{"a": values(torch.int8, 501), "b": values(torch.int8, 500)}],
    "empty": lambda: [{"a": floats(0), "b": values(torch.float32, 3, 0, 2), "c": floats(1000)}],
    "scalar": lambda: [{"a": torch.tensor(3.5), "b": torch.tensor(1.5, dtype=torch.bfloat16)}],
    "an empty file": lambda: [{"a": floats(7)}, {}],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TRANSPORTS)
async def test_what_arrives_is_what_was_written(name: str, case: str, tmp_path: Path) -> None:
    files = CASES[case]()
    for path, tensors in zip(write_index(tmp_path, files), files, strict=True):
        save_file(tensors, path)
    written = {key: tensor for tensors in files for key, tensor in tensors.items()}
    chunks, arrived = await carry(*ends(name, LIMIT), tmp_path)
    assert [list(tensors) for tensors in arrived] == [chunk.names for chunk in chunks]
    assert sum(map(len, arrived)) == len(written)
    for tensors in arrived:
        assert sum(map(size_of, tensors.values())) <= LIMIT or len(tensors) == 1
        for key, tensor in tensors.items():
            assert (tensor.dtype, tensor.shape) == (written[key].dtype, written[key].shape)
            assert torch.equal(tensor, written[key]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["gloo", "torch_gloo", "nccl", "cuda_ipc"])
async def test_what_the_ranks_hold_arrives_as_their_files_would(
    name: str, ranks: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    shapes = [(3,), (1000,), (), (0, 2), (125, 2), (7, 5), (250,), (1,)]
    tensors = {f"t{i}": values(dtype, *shape, seed=i) for i, shape in enumerate(shapes)}
    dealt = [{name: tensors[name] for name in share} for share in deal_by_turns(list(tensors), ranks)]
    for path, share in zip(write_index(tmp_path, dealt), dealt, strict=True):
        save_file(share, path)
    senders = ThreadSenders(ranks)
    transport, receiver = ends(name, LIMIT, senders)
    for source in (tmp_path, HeldByThreads(senders, dealt, dtype), tmp_path):
        chunks, arrived = await carry(transport, receiver, source)
        assert [list(tensors) for tensors in arrived] == [chunk.names for chunk in chunks]
        assert sorted(key for chunk in arrived for key in chunk) == sorted(tensors)
        assert all(sum(map(size_of, chunk.values())) <= LIMIT or len(chunk) == 1 for chunk in arrived)
        for key, tensor in (pair for chunk in arrived for pair in chunk.items()):
            assert tensor.dtype == dtype
            assert torch.equal(tensor, tensors[key]), key


def deal_by_turns(names: list[str], ranks: int) -> list[list[str]]:
    return [names[rank::ranks] for rank in range(ranks)]


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_tensors_that_were_views_arrive_in_order(name: str, tmp_path: Path) -> None:
    """Tensors as the trainer writes them: transposed, strided, expanded."""
    base = values(torch.bfloat16, 6, 10)
    views = {"transposed": base.T, "strided": base[::2, 1::3], "expanded": base[:1].expand(4, 10)}
    shapes = {key: tuple(view.shape) for key, view in views.items()}
    write_tensors(tmp_path / "model.safetensors", shapes, torch.bfloat16, views.values())
    _, arrived = await carry(*ends(name, LIMIT), tmp_path)
    for key, view in views.items():
        assert torch.equal({k: t for chunk in arrived for k, t in chunk.items()}[key], view)


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_no_more_is_in_a_chunk_than_fits(name: str, tmp_path: Path) -> None:
    save_file({f"t{i:02}": floats(60) for i in range(10)}, tmp_path / "model.safetensors")
    chunks, _ = await carry(*ends(name, LIMIT), tmp_path)
    assert [len(chunk.entries) for chunk in chunks] == [4, 4, 2]


@pytest.mark.parametrize("kind", [FileSource, CapturedSource])
@pytest.mark.parametrize("name", ["gloo", "nccl"])
async def test_the_next_chunk_is_read_while_one_is_sent(
    name: str, kind: type[ChunkSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{i}": floats(250) for i in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    been_read = [threading.Event() for _ in range(4)]
    fill = kind.fill

    def noted(source: ChunkSource, index: int, buffer: Tensor) -> None:
        fill(source, index, buffer)
        been_read[index].set()

    def patient(rank: int) -> BroadcastSender:
        sender, to_come = make(rank), been_read[1:]
        broadcast = sender.broadcast

        def wait_and_broadcast(packed: Tensor) -> None:
            assert not to_come or to_come.pop(0).wait(PATIENCE_S)
            broadcast(packed)

        sender.broadcast = wait_and_broadcast
        return sender

    monkeypatch.setattr(kind, "fill", noted)
    senders = ThreadSenders(1)
    transport, receiver = ends(name, LIMIT, senders)
    make, transport.factory = transport.factory, patient
    held = HeldByThreads(senders, [tensors], torch.float32)
    chunks, arrived = await carry(transport, receiver, tmp_path if kind is FileSource else held)
    assert [chunk.names for chunk in chunks] == [["t0"], ["t1"], ["t2"], ["t3"]]
    assert all(torch.equal(tensor, floats(250)) for tensors in arrived for tensor in tensors.values())


@pytest.mark.parametrize("name", ["gloo", "torch_gloo", "nccl", "cuda_ipc"])
async def test_ranks_that_came_in_the_middle_of_a_sync_take_no_part_in_it(name: str, tmp_path: Path) -> None:
    """Else the reason of its failure would not be that ranks died, and it would not be tried again."""
    save_file({f"t{i}": floats(250) for i in range(4)}, tmp_path / "model.safetensors")
    senders = ThreadSenders(1)
    transport, receiver = ends(name, LIMIT, senders)
    await transport.open(tmp_path)
    await senders.restart()
    with pytest.raises(TrainerError, match="fresh ones take no part"):
        await transport.load(0)
    await transport.close()
    await transport.leave()
    chunks, arrived = await carry(transport, receiver, tmp_path)
    assert len(chunks) == len(arrived) == 4


@pytest.mark.parametrize(("ranks", "on_device"), [(1, True), (2, False)])
def test_ranks_pass_chunks_on_from_the_host_over_gloo(ranks: int, on_device: bool) -> None:
    """NCCL may hang when it passes chunks on in one thread, and gathers shards in another."""
    group = cast(dist.ProcessGroup, object()) if ranks > 1 else None
    share = WeightShare(0, torch.float32, [{"a": (3,)}, *[{}] * (ranks - 1)], {"a": floats(3)}, group)
    assert CapturedSource(share, LIMIT, everywhere=True).on_device is on_device


async def test_a_load_under_way_ends_before_its_rank_stops_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one rank would begin a chunk that its peers do not, and wait for them."""
    senders = ThreadSenders(2)
    transport, _ = ends("gloo", LIMIT, senders)
    dealt = [{f"t{2 * i + rank}": floats(250) for i in range(4)} for rank in range(2)]
    late, fill = threading.Event(), CapturedSource.fill

    def slow(source: CapturedSource, index: int, buffer: Tensor) -> None:
        assert index != 1 or late.wait(PATIENCE_S)
        fill(source, index, buffer)

    closing, close = list[ChunkBuffer](), ChunkBuffer.close

    def noted(buffer: ChunkBuffer) -> None:
        closing.append(buffer)
        close(buffer)

    monkeypatch.setattr(CapturedSource, "fill", slow)
    monkeypatch.setattr(ChunkBuffer, "close", noted)
    held = HeldByThreads(senders, dealt, torch.float32)
    await transport.open(held)
    await transport.load(0)
    buffers: list[ChunkBuffer] = [sender._buffer for sender in senders.senders]
    calls = [asyncio.create_task(senders.sender_call("load", 1))]
    await until(lambda: all(buffer._loading.locked() for buffer in buffers))
    calls.append(asyncio.create_task(senders.sender_call("close")))
    await until(lambda: len(closing) == len(buffers))
    late.set()
    await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)
    await transport.open(held)
    await asyncio.wait_for(transport.load(0), PATIENCE_S)
    await transport.close()


@pytest.mark.parametrize("name", ["gloo", "torch_gloo", "nccl"])
async def test_each_replicas_workers_have_ranks_of_their_own(name: str) -> None:
    transport, _ = ends(name, LIMIT)
    assert isinstance(transport, BroadcastTransport)
    await transport._senders.open_sender(transport.factory)
    messages = await transport.form([1, 4, 2])
    assert [message["rank_offset"] for message in messages] == [1, 2, 6]
    assert {message["world_size"] for message in messages} == {8}
    await transport.leave()


def test_nccl_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a member is missing it never returns, and cannot be told to."""
    sender, in_nccl = NcclSender(0), threading.Event()
    assert sender._in_time(lambda: 7) == 7
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(sender._in_time, lambda: (in_nccl.set(), threading.Event().wait()))
        assert in_nccl.wait(PATIENCE_S)
        sender.leave()
        with pytest.raises(SamplerError, match="the trainer left the group"):
            waiting.result(PATIENCE_S)
    monkeypatch.setattr(nccl, "TIMEOUT_S", 0.01)
    with pytest.raises(SamplerError, match="not all samplers took part in NCCL within 0 s"):
        sender._in_time(threading.Event().wait)


def test_members_of_torchs_nccl_find_the_id_of_their_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    unique = bytes(range(128))
    monkeypatch.setattr(NcclSender, "prepare", lambda _: base64.b64encode(unique).decode())
    sender = TorchNcclSender(0)
    store, _, _ = open_port(sender.prepare())
    for prefix in (GROUP, f"{GROUP}/", "cuda/"):  # as torch.distributed nests them
        store = PrefixStore(prefix, store)
    assert store.get("0") == unique
    sender.leave()


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match=r"holds no model\.safetensors"):
        read_chunks(tmp_path, LIMIT)
    file = tmp_path / "model.safetensors"
    save_file({"a": floats(100)}, file)
    whole = file.read_bytes()
    damages = {
        "ends early": whole[:-1],
        "without its header": whole[:20],
        "empty": b"",
        "other lengths": whole.replace(b"[100]", b"[101]"),
        "not JSON": whole.replace(b'"dtype"', b'"dtype!'),
    }
    for content in damages.values():
        file.write_bytes(content)
        with pytest.raises(SamplerError, match=r"model\.safetensors' is not a whole safetensors file"):
            read_chunks(tmp_path, LIMIT)


def test_weights_in_another_format_beside_them_are_not_sent(tmp_path: Path) -> None:
    save_file({"layers.0.wq": floats(9)}, tmp_path / "consolidated.safetensors")
    for names in (["a"], ["a", "b"]):
        paths = [tmp_path / "model.safetensors"] if names == ["a"] else write_index(tmp_path, names)
        for name, path in zip(names, paths, strict=True):
            save_file({name: floats(9)}, path)
        (chunk,) = read_chunks(tmp_path, LIMIT)
        assert chunk.names == names
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SamplerError, match=r"names model-00002-of-00002\.safetensors, which are not there"):
        read_chunks(tmp_path, LIMIT)


def test_a_file_that_shrinks_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": floats(100)}, file)
    (chunk,) = read_chunks(tmp_path, LIMIT)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SamplerError, match="ends within tensor a"):
        chunk.read(memoryview(bytearray(chunk.size)))


def test_the_transport_follows_device_and_placement() -> None:
    assert choose("auto", "cpu", colocated=False) == choose("auto", "cpu", colocated=True) == "shared_memory"
    assert choose("gloo", "cpu", colocated=False) == "gloo"
    assert choose("auto", "cuda", colocated=False) == "nccl"
    assert choose("auto", "cuda", colocated=True) == "cuda_ipc"
    with pytest.raises(StartupError, match="nccl needs device cuda"):
        choose("nccl", "cpu", colocated=False)
    with pytest.raises(StartupError, match=r"nccl does not fit .* set cuda_ipc"):
        choose("nccl", "cuda", colocated=True)
    with pytest.raises(StartupError, match=r"gloo does not fit .* set nccl"):
        choose("gloo", "cuda", colocated=False)


def test_samplers_in_groups_of_torch_have_the_backend_of_the_device() -> None:
    for setting in ("auto", "gloo"):
        assert choose(setting, "cpu", colocated=False, torch_groups=True) == "torch_gloo"
    assert choose("auto", "cuda", colocated=False, torch_groups=True) == "torch_nccl"
    with pytest.raises(StartupError, match=r"shared_memory does not fit device cpu .* set gloo"):
        choose("shared_memory", "cpu", colocated=False, torch_groups=True)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("shared_memory", "skyrl_staged"),
        ("gloo", "skyrl_staged"),
        ("nccl", "nccl"),
        ("cuda_ipc", "ipc"),
        ("torch_gloo", "gloo"),
        ("torch_nccl", "nccl"),
    ],
)
def test_each_transport_names_its_engine(name: TransportName, backend: str) -> None:
    assert factory.TRANSPORTS[name].backend == backend
    assert make_transport(name, ThreadSenders(1), LIMIT).backend == backend


def test_each_transport_names_its_ways_within_a_host_and_across() -> None:
    assert factory.TRANSPORTS["shared_memory"].ways == ("shared memory", "pull")
    assert [factory.TRANSPORTS[name].ways[0] for name in ("gloo", "nccl", "cuda_ipc")] == [
        "gloo",
        "nccl",
        "cuda ipc",
    ]
