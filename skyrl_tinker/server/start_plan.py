"""Plan of a start on GPUs: the GPUs there, the server that fits, and the settings that follow."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from skyrl_tinker.config import BaseOverrides, Settings
from skyrl_tinker.domain.memory_costs import MemoryCosts, RowMemory
from skyrl_tinker.domain.units import GB, counted
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import StartupError, last_line
from skyrl_tinker.inference.sampling_engine import engine_of
from skyrl_tinker.server.base_models import base_model, catalog
from skyrl_tinker.server.capacity_plan import MOST_TOKENS, CapacityPlan, make_plan, sampler_problem
from skyrl_tinker.server.gpu_division import GpuDivision, divide
from skyrl_tinker.server.memory_estimate import SAMPLER, Demand, MemoryEstimate, MemoryLine
from skyrl_tinker.system import processes
from skyrl_tinker.weight_sync.factory import CHUNK_BYTES

_DIVIDED = ("placement", "trainer_ranks", "replicas", "tensor_parallel_size")
_KEPT = (
    *_DIVIDED,
    "context_length",
    "token_budget",
    "gradient_checkpointing",
    "max_lora_rank",
    "resident_models",
)
_NO_PLAN = "no plan can be made (serve --no-plan starts without one)"
_PROBE = """
import torch
sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())]
print(len(sizes), min(sizes, default=0))
"""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of the machine."""

    count: int
    bytes: float  # of the smallest


def probe_gpus() -> Gpus:
    """Find the GPUs that a process of torch sees."""
    count, size = _run("--device cuda: torch cannot find the GPUs", "-c", _PROBE).split()
    return Gpus(int(count), int(size))


@dataclass(frozen=True, slots=True)
class FurtherPlan:
    """Further base model of a plan. Without `lines` nothing is planned for it: its samplers run elsewhere."""

    name: str
    on_demand: bool
    gpus: int
    lines: tuple[MemoryLine, ...]


CostsOf = Callable[[Mapping[str, Any], Demand, int], MemoryCosts]


class CostsProcess:
    """Process that measures costs, started by the first ones asked for. As a context it ends behind it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._errors.close()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def costs(self, config: Mapping[str, Any], demand: Demand, ranks: int) -> MemoryCosts:
        """Measure the costs of a base model, given its config.json, on that many ranks. It takes seconds."""
        tokens = max(demand.longest_row, MOST_TOKENS)
        request = json.dumps({"config": config, "rank": demand.rank, "tokens": tokens, "ranks": ranks})
        if request not in _MEASURED:
            _MEASURED[request] = self._measure(request)
        costs = json.loads(_MEASURED[request])
        rows = {name: RowMemory(**costs[name]) for name in ("kept", "recomputed", "layer")}
        return MemoryCosts(**{**costs, **rows})

    def _measure(self, request: str) -> str:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "skyrl_tinker.server.costs_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                preexec_fn=processes.die_with_parent,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # its last words say why
            print(request, file=self._process.stdin, flush=True)
        if costs := self._process.stdout.readline():
            return costs
        code = self._process.wait()
        self._errors.seek(0)
        raise StartupError(f"{_NO_PLAN}: {last_line(self._errors.read() or f'exit code {code}')}")


_MEASURED: dict[str, str] = {}
"""Costs as JSON, measured once for all base models of one shape, by request."""


def require_planned(settings: Settings) -> None:
    """Refuse settings that name no base model, or with which a start makes no plan, with StartupError."""
    if "base_model" not in settings.model_fields_set:
        raise StartupError("base_model: found none, expected --base-model, or one in the file of --config")
    unplanned = ("sampler_urls", "prefill_urls", "decode_urls", "ray_address")
    if found := next((name for name in unplanned if getattr(settings, name)), None):
        raise StartupError(f"{found}: found one, with which `serve` plans nothing; leave it out for a plan")


def plan(settings: Settings, gpus: Gpus, costs_of: CostsOf, *, tenants: int = 1) -> CapacityPlan:
    """Plan a server of these settings. Given ones are kept, the rest chosen.

    Raises StartupError for a base model that cannot be served, for GPUs that are too few, and for float32.
    """
    if settings.trainer_dtype == "float32":
        raise StartupError(f"--trainer-dtype float32: {_NO_PLAN}, as it counts the memory of bfloat16")
    config, facts = base_model.read_config(settings)
    demand = _demand(settings, gpus, facts, tenants=tenants)
    return make_plan(demand, facts, partial(costs_of, config, demand))


def _demand(
    settings: Settings, gpus: Gpus, facts: BaseModelFacts, *, tenants: int = 1, trained: bool = True
) -> Demand:
    return Demand(
        gpus=gpus.count,
        gpu_bytes=gpus.bytes,
        context=facts.context_length,
        rank=settings.max_lora_rank,
        tenants=tenants,
        chunk_bytes=CHUNK_BYTES,
        adapter_slots=settings.max_loras,
        expert_rank=engine_of(settings).expert_slot_rank(settings.max_lora_rank, facts.experts_per_token),
        cached_adapters=settings.max_cpu_loras,
        sampler_share=settings.gpu_memory_utilization,
        copies=engine_of(settings).workers(1),
        trained=trained,
        given=_given(settings),
    )


def _given(settings: Settings) -> dict[str, Any]:
    given = {name: getattr(settings, name) for name in _KEPT if name in settings.model_fields_set}
    return {name: value for name, value in given.items() if value not in (None, "auto")}


def place(
    settings: Settings,
    tell: Callable[[str], None],
    probe: Callable[[], Gpus] = probe_gpus,
    costs_of: CostsOf | None = None,
) -> Settings:
    """Complete the settings: on GPUs as planned, or without a plan the placement alone.

    `tell` receives the choices and reasons. Raises StartupError with settings to change if it does not fit.
    """
    if settings.device == "cpu":
        return _placed(settings, "separate")
    if settings.external_urls:
        if settings.bases and settings.ray_address is None:
            with CostsProcess() as measuring:
                settings, _, _ = beside_further(settings, probe(), costs_of or measuring.costs, tell)
        return _placed(settings, "separate")
    if settings.ray_address is not None:
        return _placed(_divided(settings), "separate")
    if not settings.plan and settings.placement != "auto":
        return settings
    with CostsProcess() as measuring:
        costs_of = costs_of or measuring.costs
        settings, gpus, _ = beside_further(settings, probe(), costs_of, tell)
        if not settings.plan:
            return _placed(settings, _placement(settings, gpus))
        return settings.model_copy(update=_planned(settings, gpus, costs_of, tell).settings)


def _planned(
    settings: Settings,
    gpus: Gpus,
    costs_of: CostsOf,
    tell: Callable[[str], None],
    whose: str = "",
    unset: Collection[str] = (),
) -> CapacityPlan:
    """Return a plan that fits. `whose`: base model in the words of the plan. `unset`: kept by default."""
    found = plan(settings, gpus, costs_of)
    if found.problem is not None:
        assert found.place is not None
        raise StartupError(
            _refusal(settings, gpus, found.problem, found.place, found.lines, further=bool(whose))
        )
    shown = (replace(each, reason="by default") if each.setting in unset else each for each in found.choices)
    lines = (f"  {choice}" for choice in shown)
    tell("\n".join((f"planned{whose} for {_named(gpus)}; `serve --no-plan` leaves it to you:", *lines)))
    return found


def beside_further(
    settings: Settings, gpus: Gpus, costs_of: CostsOf, tell: Callable[[str], None]
) -> tuple[Settings, Gpus, list[FurtherPlan]]:
    """Return the settings with those of further base models, the GPUs that these leave, and their plans.

    Of those on demand the largest counts alone: they run one after another where they do not fit beside each
    other. `tell` receives the plan of each. StartupError if one does not fit.
    """
    taken, most, bases, plans = 0, 0, dict(settings.bases), list[FurtherPlan]()
    for name, given in settings.bases.items():
        own = settings.for_base(name)
        copies = engine_of(own).workers(1)
        way = GpuDivision("separate", own.trainer_ranks, own.replicas, own.tensor_parallel_size, copies)
        samplers = 0 if own.external_urls else way.samplers
        ranks = way.ranks if given.trains else 0
        on_demand, need = given.start == "on_demand", samplers + ranks
        taken, most = (taken, max(most, need)) if on_demand else (taken + need, most)
        left = gpus.count - taken - most
        share = replace(gpus, count=need)
        whose, lines = f"{name}, on demand," if on_demand else name, tuple[MemoryLine, ...]()
        with catalog.refusals(own):
            if left < 1:
                numbers = f"{'trainer_ranks and ' if ranks else ''}replicas x tensor_parallel_size"
                raise StartupError(
                    f"{numbers} take {need} GPUs, found {gpus.count} in all, and base_model needs one"
                )
            if settings.plan and ranks and not own.external_urls:
                unset = {name for name in _DIVIDED if name not in given.model_fields_set}
                found = _planned(own, share, costs_of, tell, f" {whose}", unset)
                keys = BaseOverrides.model_fields.keys() & found.settings.keys()
                bases[name] = given.model_copy(update={key: found.settings[key] for key in keys})
                lines = found.lines
            elif settings.plan and samplers:
                lines = _require_sampler(own, share, way, costs_of)
                tell(f"{whose} is sampled on {_named(share)}")
        plans.append(FurtherPlan(name, on_demand, need, lines))
    if sum(given.start == "on_demand" for given in bases.values()) > 1:
        tell(f"base models on demand share {counted(most, 'GPU')}: one that is idle stops for another")
    left = gpus.count - taken - most
    return settings.model_copy(update={"bases": bases} if bases else {}), replace(gpus, count=left), plans


def _require_sampler(
    settings: Settings, gpus: Gpus, way: GpuDivision, costs_of: CostsOf
) -> tuple[MemoryLine, ...]:
    """Return the memory of a base model that is only sampled. Raises StartupError if it does not fit."""
    config, facts = base_model.read_config(settings)
    demand = _demand(settings, gpus, facts, trained=False)
    estimate = MemoryEstimate(demand, facts, way, costs_of(config, demand, way.ranks))
    if problem := sampler_problem(estimate):
        raise StartupError(_refusal(settings, gpus, problem, SAMPLER, estimate.lines(), further=True))
    return estimate.lines()


def _divided(settings: Settings) -> Settings:
    """Return settings that say themselves how a cluster's GPUs are divided."""
    missing = [name for name in ("trainer_ranks", "replicas") if name not in settings.model_fields_set]
    if missing:
        raise StartupError(
            f"--ray-address with --device cuda: set {' and '.join(missing)}: a plan is made for GPUs of one "
            "host only, and which GPUs the cluster has is not known before it is joined"
        )
    return settings


def _placed(settings: Settings, placement: str) -> Settings:
    if settings.placement != "auto":
        return settings
    return settings.model_copy(update={"placement": placement})


def _placement(settings: Settings, gpus: Gpus) -> str:
    """Return the placement by numbers of GPUs alone."""
    numbers = {name: getattr(settings, name) for name in _DIVIDED if name != "placement"}
    copies = engine_of(settings).workers(1)
    return divide(gpus.count, numbers, [settings.tensor_parallel_size], copies)[0][0].placement


def _refusal(
    settings: Settings, gpus: Gpus, problem: str, place: str, lines: Sequence[MemoryLine], *, further: bool
) -> str:
    counted = [line for line in lines if line.place == place and line.counted]
    sizes = (f"{line.name} {line.bytes / GB:.1f}" for line in counted if abs(line.bytes) >= GB / 20)
    together = sum(line.bytes for line in counted) / GB
    table = f'[bases."{settings.base_model}"]'
    own = f"; its own settings stand in a table {table} of the file of --config" if further else ""
    return (
        f"--base-model {settings.base_model} does not fit on {_named(gpus)}: {problem} ({place}, "
        f"GB: {', '.join(sizes)}, together {together:.1f}){own}; or --no-plan (the setting "
        "plan) to start all the same"
    )


def _named(gpus: Gpus) -> str:
    return f"{gpus.count} GPU{'s' if gpus.count > 1 else ''} of {gpus.bytes / GB:.0f} GB"


def _run(task: str, *arguments: str) -> str:
    """Run Python in a process of its own, since it takes torch; return the last line that it prints."""
    ended = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, preexec_fn=processes.die_with_parent
    )
    if ended.returncode:
        said = last_line(ended.stderr or f"exit code {ended.returncode}")
        raise StartupError(f"{task}: {said}")
    return ended.stdout.splitlines()[-1]
