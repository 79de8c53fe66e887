"""Snapshot of the server as one caller sees it: problems first."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from skyrl_tinker import __version__
from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.api.services import Services
from skyrl_tinker.api.waiting.queue_reasons import engine_reason, queue_reason
from skyrl_tinker.api.waiting.server_snapshot import ServerSnapshot
from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.domain.units import counted, duration
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.protocol.queue_views import ASLEEP, Incident, QueuesView, SamplingView, TrainingView
from skyrl_tinker.protocol.schemas.base import utc
from skyrl_tinker.protocol.schemas.now import (
    GpuNow,
    MemoryNow,
    NowResponse,
    Problem,
    QueueOfTenant,
    RatesNow,
    ReplicaNow,
    SamplersNow,
    ServedModel,
    ServerNow,
    TrainerNow,
    UnitNow,
    WhoAsks,
)
from skyrl_tinker.redaction import without_paths
from skyrl_tinker.store.console.parked_models import NAMED, ParkedModel
from skyrl_tinker.store.console.pending import PendingGroup
from skyrl_tinker.store.database.rows import values_of
from skyrl_tinker.store.owners import reaches
from skyrl_tinker.system.gpu_memory import GpuMemory
from skyrl_tinker.system.host_memory import host_memory

_LEVELS: Mapping[str, Literal["error", "warning", "info"]] = {
    "starting": "info",
    "restarting": "warning",
    "failed": "error",
}
"""Levels of the engine's states in which it takes no work."""
LONG_S, VERY_LONG_S = 10.0, 120.0
"""Ages at which a waiting request is listed, and is a warning."""
RECENT_S = 900.0
"""Time for which a loss and a recovery are listed."""
LONGEST = 5
"""Most waiting requests listed."""


class NowView:
    """View of a snapshot for one caller."""

    def __init__(self, deps: Services, snapshot: ServerSnapshot, caller: Caller) -> None:
        self._deps = deps
        self._snapshot = snapshot
        self._caller = caller
        self._queue = [self._entry(group) for group in snapshot.pending if self._sees(group.owner_id)]
        self._queue += self._guests()

    async def message(self) -> NowResponse:
        snapshot, queues = self._snapshot, self._snapshot.queues
        shortage, detail = self._told(await self._deps.room.shortage()), self._told(snapshot.engine.detail)
        return NowResponse(
            at=utc(snapshot.at),
            server=self._server(),
            caller=who_asks(self._deps, self._caller),
            state=snapshot.engine.state,
            detail=shortage or detail,
            ready=snapshot.engine.ready and not shortage,
            problems=[*self._problems(shortage, detail), *self._waits()],
            processes=list(snapshot.processes) if sees_all(self._caller) else None,
            memory=_memory(snapshot.gpus) if sees_all(self._caller) else None,
            replicas=[]
            if queues is None
            else [row for each in queues.sampling.items() for row in self._replicas(*each)],
            queue=self._queue,
            rates=queues and RatesNow(trained=queues.trained, sampled=queues.sampled),
            trainers=None if queues is None else [self._trainer(*each) for each in queues.training.items()],
            samplers=queues
            and [SamplersNow(**values_of(each), base_model=name) for name, each in queues.sampling.items()],
        )

    def _told(self, text: str | None) -> str:
        """Return a text for the caller: who does not see the server itself need not know its paths."""
        return (text or "") if sees_all(self._caller) else without_paths(text or "")

    def _server(self) -> ServerNow:
        started_at = self._snapshot.started_at
        return ServerNow(
            version=__version__,
            device=self._deps.settings.device,
            started_at=None if started_at is None else utc(started_at),
            base_models=[self._served(facts) for facts in self._deps.bases.all],
        )

    def _served(self, facts: BaseModelFacts) -> ServedModel:
        settings = self._deps.settings.for_base(facts.name)
        state, detail = self._state_of(facts.name)
        since, queues = self._snapshot.engine.since.get(facts.name), self._snapshot.queues
        processes = self._snapshot.processes if sees_all(self._caller) else ()
        own = [each for each in processes if each.base_model == facts.name]
        return ServedModel(
            base_model=facts.name,
            context_length=facts.context_length,
            trainable=facts.trainable,
            sampleable=facts.sampleable,
            placement=settings.placement,
            trainer_ranks=settings.trainer_ranks if facts.trainable else 0,
            sampler=str(facts.sampler),
            replicas=len(settings.external_urls) or settings.replicas,
            state=state,
            detail=self._told(detail),
            start="always" if self._deps.settings.idle_s_of(facts.name) is None else "on_demand",
            since=None if since is None else utc(since),
            idle_s=None if queues is None else queues.idle.get(facts.name),
            rss_bytes=sum(each.rss_bytes for each in own) or None,
            gpu_bytes=sum(each.gpu_bytes or 0 for each in own) or None,
        )

    def _state_of(self, base_model: str) -> tuple[str, str]:
        engine = self._snapshot.engine
        return engine.base_models.get(base_model, (engine.state, engine.detail))

    # Problems

    def _problems(self, shortage: str, detail: str) -> Iterator[Problem]:
        snapshot = self._snapshot
        if shortage:
            yield Problem(level="error", subject="disk", text=shortage)
        if not snapshot.engine.ready:
            text = f"the engine is {snapshot.engine.state}: {detail}"
            yield Problem(level=_LEVELS[snapshot.engine.state], subject="engine", text=text)
        elif detail == ASLEEP:
            yield Problem(level="info", subject="models", text=ASLEEP)
        elif detail:
            yield Problem(level="warning", subject="samplers", text=detail)
        if snapshot.engine.ready and snapshot.queues is None:
            yield Problem(level="error", subject="engine", text="the engine does not answer")
        if snapshot.warning and sees_all(self._caller):
            yield Problem(level="warning", subject="logprobs", text=snapshot.warning)
        yield from self._parked()
        if snapshot.queues is not None:
            yield from self._engine_problems(snapshot.queues)

    def _parked(self) -> Iterator[Problem]:
        by_base: dict[str, list[ParkedModel]] = {}
        for each in self._snapshot.parked:
            if self._sees(each.owner_id):
                by_base.setdefault(each.base_model, []).append(each)
        for base_model, models in by_base.items():
            yield Problem(level="warning", subject="models", text=_why_parked(base_model, models))

    def _engine_problems(self, queues: QueuesView) -> Iterator[Problem]:
        several = len(self._deps.bases.all) > 1
        for name, trained in queues.training.items():
            yield from self._happened(f"processes of {name}" if several else "processes", trained.incidents)
        for name, view in queues.sampling.items():
            whose = f" of {name}" if several else ""
            if view.paused is not None and self._state_of(name)[0] != "stopped":
                yield Problem(level="info", subject=f"samplers{whose}", text=view.paused)
            yield from self._happened(f"processes{whose}", view.incidents)

    def _happened(self, subject: str, incidents: Iterable[Incident]) -> Iterator[Problem]:
        now = self._snapshot.at
        for incident in incidents if sees_all(self._caller) else ():
            if now - incident.at < RECENT_S:
                level: Literal["info", "warning"] = "info" if incident.mended else "warning"
                text = f"{duration(now - incident.at)} ago {incident.text}"
                yield Problem(level=level, subject=subject, text=text)

    def _waits(self) -> list[Problem]:
        """Return the requests that wait longest, with the words of the long poll."""
        slow = [entry for entry in self._queue if (entry.oldest_age_s or 0.0) >= LONG_S]
        slow.sort(key=lambda entry: -(entry.oldest_age_s or 0.0))
        return [_wait(entry) for entry in slow[:LONGEST]]

    # Queues

    def _sees(self, owner: OwnerId | None) -> bool:
        return reaches(self._caller.reach, owner)

    def _entry(self, group: PendingGroup) -> QueueOfTenant:
        return QueueOfTenant(
            **values_of(group),
            kind="sampling" if group.sampling else "training",
            oldest_age_s=max(0.0, self._snapshot.at - group.created_at),
            reason=self._reason(group),
        )

    def _reason(self, group: PendingGroup) -> str | None:
        stopped, queues = engine_reason(self._snapshot.engine), self._snapshot.queues
        if stopped is not None:
            return stopped.text
        return None if queues is None else queue_reason(group.oldest, queues).text

    def _guests(self) -> Iterator[QueueOfTenant]:
        queues = self._snapshot.queues
        views = () if queues is None else queues.sampling.values()
        for session, guest in self._snapshot.guests.items():
            for view in (view for view in views if session in view.queued and self._sees(guest.owner_id)):
                yield QueueOfTenant(
                    owner=guest.owner,
                    name=None,
                    session_id=session,
                    kind="sampling",
                    waiting=view.queued[session].waiting,
                    oldest_age_s=None,
                    reason=view.paused,
                )

    # Parts

    def _trainer(self, base_model: str, view: TrainingView) -> TrainerNow:
        running = self._unit(view.running_kind, view.running)
        if running is not None:
            running = running.model_copy(update={"tokens": view.running_tokens, "running_s": view.running_s})
        return TrainerNow(
            base_model=base_model,
            running=running,
            following=self._unit(view.next_kind, view.next_models),
            unit_s=view.unit_s,
        )

    def _unit(self, kind: str | None, keys: tuple[int, ...]) -> UnitNow | None:
        if kind is None:
            return None
        models = [self._snapshot.models[key] for key in keys if key in self._snapshot.models]
        seen = [model for model in models if self._sees(model.owner_id)]
        ids, names = [model.model_id for model in seen], [model.name for model in seen]
        return UnitNow(kind=kind, model_ids=ids, names=names, others=len(keys) - len(seen))

    def _replicas(self, base_model: str, view: SamplingView) -> list[ReplicaNow]:
        alone = view.in_flight if len(view.replicas) == 1 else None
        hidden = {} if sees_all(self._caller) else dict.fromkeys(("address", "host"))
        return [
            ReplicaNow(
                **values_of(replica) | hidden,
                base_model=base_model,
                in_flight=alone,
                weights=list(view.weights) if replica.address else [],
            )
            for replica in view.replicas
        ]


def _memory(gpus: GpuMemory) -> MemoryNow:
    found = host_memory()
    told = [GpuNow(used_bytes=used, total_bytes=total) for used, total in gpus.gpus]
    return MemoryNow(total_bytes=found.total, available_bytes=found.available, gpus=told)


def sees_all(caller: Caller) -> bool:
    """Return whether a caller sees the server itself: it has an admin key, or there are no keys."""
    return caller.admin or caller.owner is None


def who_asks(deps: Services, caller: Caller) -> WhoAsks:
    return WhoAsks(name=caller.name, admin=caller.admin, keys=deps.keys.locked, sees_all=sees_all(caller))


def _why_parked(base_model: str, models: Sequence[ParkedModel]) -> str:
    """Return how many models of a base model are parked, the last made, and why that is."""
    count = sum({each.owner_id: each.count for each in models}.values())
    names = [each.name or each.model_id for each in models[:NAMED]]
    others = f" and {count - len(names)} more" if count > len(names) else ""
    is_, of_one = ("is", "") if count == 1 else ("are", ", the first of them")
    told = f"{counted(count, 'model')} of {base_model} {is_} parked ({', '.join(names)}{others})"
    return f"{told}{of_one} because {models[0].cause}"


def _wait(entry: QueueOfTenant) -> Problem:
    age = entry.oldest_age_s or 0.0
    many = "request" if entry.waiting == 1 else "requests"
    return Problem(
        level="warning" if age >= VERY_LONG_S else "info",
        subject=f"{entry.name} ({entry.session_id})" if entry.name else entry.session_id,
        text=f"{entry.waiting} {entry.kind} {many} of {entry.owner}, the oldest for {duration(age)}: "
        f"{entry.reason or 'running'}",
    )
