"""What passes through a real group of gloo; a pickle that is loaded leaves a file."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from skyrl_tinker.inference.plugin import signed_pickles


class _Opens:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self._path), "w")


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of one member, which signs."""
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))  # restored afterwards
    signed_pickles.apply("token")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store")), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_members_exchange_objects() -> None:
    gathered = [None]
    dist.all_gather_object(gathered, {"port": 1})
    assert gathered == [{"port": 1}]
    values = [("a", 2)]
    dist.broadcast_object_list(values)
    assert values == [("a", 2)]


@pytest.mark.usefixtures("group")
def test_a_stranger_s_pickle_is_not_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "unpickled"
    for content in (pickle.dumps(_Opens(canary)), bytes(32) + pickle.dumps(_Opens(canary)), b""):
        sent = torch.frombuffer(bytearray(content + b" "), dtype=torch.uint8)
        with pytest.raises(pickle.UnpicklingError, match="a stranger has taken the place of a worker"):
            distributed_c10d._tensor_to_object(sent, len(content), None)
    assert not canary.exists()
