"""Places of the ranks in the Ray cluster: the first on the engine's host, others as near as there is room."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from skyrl_tinker.errors import NoPlaceError
from skyrl_tinker.training.trainer_spec import TrainerSpec

ROOM_S = 30.0
"""Time for the cluster to make room: Ray frees the resources of dead ranks, or a node joins."""
WAIT_S = 1
EXIT_S = 5.0


class RankPlacement:
    """Reserved places, one for each rank.

    Rank 0 is on the engine's host, as the engine reads its files in that host's memory. Ranks of one host
    have neighbouring numbers, as suits NCCL's rings.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        """Take no place until `reserve`."""
        self._needed = {"GPU": 1} if spec.device == "cuda" else {"CPU": 1}
        self._ranks = spec.ranks
        self._here: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._group: PlacementGroup | None = None
        self._removed = False
        self.nodes: tuple[str, ...] = ()  # by rank, as Ray names them; empty before `reserve`

    @property
    def hosts(self) -> int:
        """Number of hosts that have ranks."""
        return len(set(self.nodes))

    @property
    def far_ranks(self) -> list[int]:
        """The ranks on other hosts than that of rank 0 and the engine."""
        return [rank for rank, node in enumerate(self.nodes) if node != self.nodes[0]]

    @property
    def far_hosts(self) -> list[int]:
        """The first of the far ranks of each host."""
        return first_elsewhere(self.nodes)

    async def reserve(self) -> list[dict[str, Any]]:
        """Ask for the places, and wait; return the options of each rank's actor. Raises NoPlaceError."""
        asked: list[dict[str, float]] = [dict(self._needed) for _ in range(self._ranks)]
        asked[0][f"node:{self._here}"] = 0.001
        self._group = group = placement_group(asked, strategy="PACK")
        deadline = time.monotonic() + ROOM_S
        while not await asyncio.to_thread(group.wait, WAIT_S):  # ready() would start a process
            if self._removed or time.monotonic() > deadline:
                raise NoPlaceError(self._refusal())
        node_of: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        bundles = by_host(node_of)
        self.nodes = tuple(node_of[bundle] for bundle in bundles)
        return [self._options(group, bundle) for bundle in bundles]

    def remove(self) -> None:
        """Give the places back. Idempotent."""
        self._removed = True
        if self._group is not None:
            remove_placement_group(self._group)

    async def wait_gone(self, pids: Collection[int]) -> None:
        """Wait until these processes, by rank, have ended; those of a lost host have."""
        by_node: dict[str, list[int]] = {}
        for node, pid in zip(self.nodes, pids, strict=False):  # no pids: the processes never started
            by_node.setdefault(node, []).append(pid)
        here = ray.get_runtime_context().get_node_id()
        await asyncio.gather(
            *(_wait_gone(found, None if node == here else node) for node, found in by_node.items())
        )

    def _options(self, group: PlacementGroup, bundle: int) -> dict[str, Any]:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        counts = {f"num_{name.lower()}s": count for name, count in self._needed.items()}
        return {"num_cpus": 0, **counts, "scheduling_strategy": place}

    def _refusal(self) -> str:
        ((kind, each),) = self._needed.items()
        found = {
            node["NodeManagerAddress"]: int(node["Resources"].get(kind, 0))
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"]
        }
        listed = ", ".join(f"{count} at {address}" for address, count in sorted(found.items()))
        return (
            f"the Ray cluster has no room for {self._ranks} trainer ranks with {each} {kind} each, the first "
            f"on the engine's host {self._here}; it has {kind}s: {listed or 'none'}, which others may use"
        )


def first_elsewhere(nodes: Sequence[str]) -> list[int]:
    """Return the first rank of each node but that of rank 0. `nodes`: by rank."""
    return [rank for rank, node in enumerate(nodes) if nodes.index(node) == rank > 0]


def by_host(node_of: Mapping[int, str]) -> list[int]:
    """Order bundles by node: that of bundle 0 first, beginning with it, then those with more bundles."""
    counts = Counter(node_of.values())

    def place(bundle: int) -> tuple[bool, int, str, int]:
        node = node_of[bundle]
        return node != node_of[0], -counts[node], node, bundle

    return sorted(node_of, key=place)


async def _wait_gone(pids: list[int], node: str | None) -> None:
    """Wait for processes of this host, or of another node."""
    if node is None:
        await asyncio.to_thread(_wait_ended, pids)
        return
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": place}
    task: Any = ray.remote(**options)(_wait_ended)
    with suppress(RayError, TimeoutError):  # the node is gone, and they with it
        await asyncio.wait_for(task.remote(pids), 2 * EXIT_S)


def _wait_ended(pids: list[int]) -> None:
    processes = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    psutil.wait_procs(processes, timeout=EXIT_S)
