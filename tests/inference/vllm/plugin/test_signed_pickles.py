"""Two processes in a real group of gloo; a pickle that is loaded leaves a file."""

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from skyrl_tinker.inference.vllm.plugin import signed_pickles

REFUSED = "a stranger has taken the place of a worker"


class _Opens:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self._path), "w")


def _exchange(directory: Path, rank: int, token: str | None) -> tuple[list[Any], list[Any]]:
    """Gather and broadcast an object in a process of its own; one without a token does not sign."""
    if token is not None:
        signed_pickles.apply(token)
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, rank if token else _Opens(directory / "unpickled"))
    values = ["broadcast" if rank == 0 else None]
    dist.broadcast_object_list(values)
    return gathered, values


def _meet(directory: Path, *tokens: str | None) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([signed_pickles.__name__, distributed_c10d.__name__])
    with ProcessPoolExecutor(2, context) as pool:
        futures = [pool.submit(_exchange, directory, rank, token) for rank, token in enumerate(tokens)]
        return [future.exception() or future.result() for future in futures]


def test_members_exchange_objects(tmp_path: Path) -> None:
    assert _meet(tmp_path, "token", "token") == [([0, 1], ["broadcast"])] * 2


@pytest.mark.parametrize("stranger", [None, "another token"])
def test_a_stranger_s_object_is_not_loaded(tmp_path: Path, stranger: str | None) -> None:
    refused = _meet(tmp_path, "token", stranger)[0]
    assert isinstance(refused, pickle.UnpicklingError)
    assert REFUSED in str(refused)
    assert not (tmp_path / "unpickled").exists()


def test_what_is_no_signed_pickle_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))  # restored afterwards
    signed_pickles.apply("token")
    canary = tmp_path / "unpickled"
    for content in (pickle.dumps(_Opens(canary)), bytes(32) + pickle.dumps(_Opens(canary)), b""):
        sent = torch.frombuffer(bytearray(content + b" "), dtype=torch.uint8)
        with pytest.raises(pickle.UnpicklingError, match=REFUSED):
            distributed_c10d._tensor_to_object(sent, len(content), None)
    assert not canary.exists()
