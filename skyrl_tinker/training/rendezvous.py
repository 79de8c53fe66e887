"""Rendezvous of the ranks, to form their process group, and another when they gave one up."""

import os
import socket
from collections.abc import Set
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from skyrl_tinker.training import distributed
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.trainer_spec import TrainerSpec

_DESCRIPTORS = "/proc/self/fd"


class Rendezvous:
    """Rendezvous of one rank. gloo only: NCCL's peers wait in a kernel, where no broken connection shows."""

    def __init__(self, store: TCPStore, rank: int, spec: TrainerSpec) -> None:
        self._store = store
        self._rank = rank
        self._spec = spec
        self._groups = 0  # formed so far
        self._connections: list[socket.socket] = []

    def join(self) -> Ranks:
        """Join a fresh process group; every rank must call it."""
        self._groups += 1
        spec = self._spec
        store = PrefixStore(f"group{self._groups}", self._store)
        before = _descriptors()
        ranks = distributed.join(store, self._rank, spec.ranks, spec.device, spec.timeout_s)
        if spec.device == "cpu":
            self._find_connections(before.keys())
        return ranks

    def _find_connections(self, before: Set[str]) -> None:
        """Find gloo's connections, which it does not name: those of ports on which some rank listens."""
        fresh = _sockets(but=before)
        everyones: list[list[int]] = [[]] * self._spec.ranks
        dist.all_gather_object(everyones, [_port(each.getsockname()) for each in fresh if _listens(each)])
        ports = {port for own in everyones for port in own}
        self._connections = [each for each in fresh if not _listens(each) and _ends(each) & ports]
        for each in set(fresh) - set(self._connections):
            each.close()

    def give_up(self) -> None:
        """Report to the peers, and break the collectives in which they wait for this rank."""
        self._store.set(self._word, "")
        self.leave()

    def given_up(self) -> bool:
        """Return True if a peer gave this group up, which it reports before its connections break."""
        return self._store.check([self._word])

    def leave(self) -> None:
        """Break this rank's connections, not its listener: gloo would end the process.

        gloo closes them with the last reference to the group, and networks and DTensor's caches have some.
        """
        for connection in self._connections:
            with suppress(OSError):  # already broken from the other side
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._connections = []
        dist.destroy_process_group()

    @property
    def _word(self) -> str:
        return f"gave up group {self._groups}"


def _descriptors() -> dict[str, int]:
    """Descriptors of this process's sockets, by the sockets' names in the kernel."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # closed meanwhile, as the listing's own is
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def _sockets(but: Set[str]) -> list[socket.socket]:
    """Duplicates of this process's sockets, except those with these names."""
    found = []
    for name, descriptor in _descriptors().items():
        if name not in but:
            with suppress(OSError):  # closed meanwhile
                found.append(socket.socket(fileno=os.dup(descriptor)))
    return found


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _ends(found: socket.socket) -> set[int]:
    """Ports of both ends, if any."""
    try:
        return {_port(found.getsockname()), _port(found.getpeername())}
    except OSError:  # not connected
        return set()


def _port(address: Any) -> int:
    """Port of the address; -1 where the family has none."""
    return int(address[1]) if isinstance(address, tuple) else -1
