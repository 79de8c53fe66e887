"""Division of a machine's GPUs between trainer ranks and samplers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from skyrl_tinker.errors import StartupError

_MANY = 128  # GPUs: more than any ranks and samplers that are given ask for, as a rule


@dataclass(frozen=True, slots=True)
class GpuDivision:
    """One way, without samplers if `replicas` is 0. `copies`: GPUs of a replica per tensor parallelism."""

    placement: str  # separate | colocated
    ranks: int
    replicas: int
    tensor_parallel: int
    copies: int

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def samplers(self) -> int:
        return self.replicas * self.tensor_parallel * self.copies

    @property
    def gpus(self) -> int:
        return self.ranks if self.colocated else self.ranks + self.samplers

    @property
    def balance(self) -> tuple[int, int, int]:
        """The larger, the better: all GPUs, equal parts, or else more for the samplers."""
        return self.gpus, -abs(self.ranks - self.samplers), self.samplers


def divide(gpus: int, given: Mapping[str, Any], sizes: Sequence[int], copies: int) -> list[list[GpuDivision]]:
    """Return the best divisions apart, then the best colocated ones, which differ in tensor parallelism only.

    `given`: settings that they must agree with. `sizes`: of tensor parallelism, if it is not given.

    Raises StartupError when there is none.
    """
    found = []
    for placement in ("separate", "colocated"):
        ways = list(_ways(placement, gpus, given, sizes, copies))
        best = max((way.balance for way in ways), default=None)
        found.append([way for way in ways if way.balance == best])
    if not any(found):
        raise StartupError(_refusal(gpus, given, sizes, copies))
    return [ways for ways in found if ways]


def _ways(
    placement: str, gpus: int, given: Mapping[str, Any], sizes: Sequence[int], copies: int
) -> Iterator[GpuDivision]:
    if given.get("placement", placement) != placement:
        return
    every = range(1, gpus + 1)
    choices = {"tensor_parallel_size": sizes, "trainer_ranks": every, "replicas": every}
    values = ([given[name]] if name in given else choices[name] for name in choices)
    for size, ranks, replicas in product(*values):
        way = GpuDivision(placement, ranks, replicas, size, copies)
        if way.gpus <= gpus and (not way.colocated or ranks == way.samplers):
            yield way


def _refusal(gpus: int, given: Mapping[str, Any], sizes: Sequence[int], copies: int) -> str:
    apart, shared = (
        min(_ways(placement, _MANY, given, sizes, copies), key=lambda way: way.gpus, default=None)
        for placement in ("separate", "colocated")
    )
    if apart is not None:
        less = f"; {shared.gpus} would do if both share them" if shared else ""
        return (
            f"--device cuda needs {apart.gpus} GPUs ({apart.ranks} for trainer ranks, {apart.samplers} for "
            f"samplers), found {gpus}{less}"
        )
    if shared is not None:
        return f"--device cuda needs {shared.gpus} GPUs that trainer ranks and samplers share, found {gpus}"
    settings = ", ".join(f"{name} {value}" for name, value in given.items())
    return f"no number of GPUs agrees with {settings}: colocated, there is one trainer rank per sampler GPU"
