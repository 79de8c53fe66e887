"""Places of the sampler replicas in the Ray cluster."""

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from skyrl_tinker.inference.servers.replica_spec import SamplerSpec

_OPTIONS = {"GPU": "num_gpus", "memory": "memory"}
"""Ray's actor options by resource."""


class ReplicaPlacement:
    """Reserved places, one for each replica; if a host is lost, its places are reserved again on another.

    Replicas that share the trainer's GPUs have places beside the ranks, which own the GPUs.
    """

    def __init__(self, spec: SamplerSpec) -> None:
        """Ask for the places; actors wait for them."""
        self._spec = spec
        # On a CPU they run at low priority, on the ranks' cores: a byte, as a place must reserve something.
        self._needed = {"GPU": spec.workers} if spec.device == "cuda" else {"memory": 1}
        self._group: PlacementGroup | None = None
        if not spec.shared_gpus:
            bundles: list[dict[str, float]] = [dict(self._needed) for _ in range(spec.replicas)]
            self._group = placement_group(bundles, strategy="SPREAD")

    def options(self, replica: int) -> dict[str, Any]:
        """Return Ray's options for the replica's actor."""
        if self._group is None:
            beside = NodeAffinitySchedulingStrategy(self._spec.gpus_of(replica)[0].node, soft=False)
            return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": beside}
        counts = {_OPTIONS[name]: count for name, count in self._needed.items()}
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=replica)
        return {"num_cpus": 0, **counts, "scheduling_strategy": place}

    def describe(self) -> str:
        """Describe the resources that a replica needs, and those of the cluster's nodes."""
        ((kind, each),) = self._needed.items()
        nodes = sorted(
            (node["NodeManagerAddress"], int(node["Resources"].get(kind, 0)))
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"]
        )
        listed = ", ".join(f"{count} at {address}" for address, count in nodes)
        return (
            f"each needs {each} {kind}; the Ray cluster has {kind}s: {listed or 'none'}, which others may use"
        )

    def remove(self) -> None:
        """Give the places back. Idempotent."""
        if self._group is not None:
            remove_placement_group(self._group)
