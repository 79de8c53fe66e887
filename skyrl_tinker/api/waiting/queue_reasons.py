"""Reasons why a request is not finished, as text for the user.

The SDK logs the text, at most once a minute, while the state is not "active". So "active" means that the
request, or an earlier one of its model, is running.
"""

from dataclasses import dataclass

from skyrl_tinker.api.waiting.engine_client import EngineState
from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.units import counted, duration
from skyrl_tinker.protocol.queue_views import LaneView, QueuesView, SamplingView, TrainingView
from skyrl_tinker.protocol.schemas.futures import QueueState
from skyrl_tinker.redaction import without_paths
from skyrl_tinker.store.futures.cancellation import QueuePosition

CREATED = "the model is being created"
HELD = "waiting for an earlier save of this model to be written, or a checkpoint to be fetched"
AWAY = "waiting, as the storage of its weights did not answer"
_RUNNING = {
    RequestKind.CREATE_MODEL: CREATED,
    RequestKind.LOAD_WEIGHTS: "the weights are being loaded",
    RequestKind.SAVE_WEIGHTS: "the checkpoint is being written",
    RequestKind.SAVE_WEIGHTS_EXTERNAL: "the export is being written",
    RequestKind.SAVE_WEIGHTS_FOR_SAMPLER: "the weights are being sent to the samplers",
    RequestKind.UNLOAD_MODEL: "waiting for earlier requests of this model",
    RequestKind.SAMPLE: "sampling",
}
_CREATIONS = (RequestKind.CREATE_MODEL, RequestKind.LOAD_WEIGHTS)


@dataclass(frozen=True, slots=True)
class Reason:
    state: QueueState
    text: str | None


def engine_reason(engine: EngineState) -> Reason | None:
    """Return why nothing runs; None while the engine takes work."""
    if engine.ready:
        return None
    return Reason("paused_capacity", f"the engine is {engine.state}: {without_paths(engine.detail)}")


def queue_reason(position: QueuePosition, queues: QueuesView) -> Reason:
    if position.kind is RequestKind.SAMPLE:
        view = queues.sampling.get(position.base_model or "")
        return _running(position) if view is None else _sampling(position, view)
    model = -1 if position.model_key is None else position.model_key
    trained = next((view for view in queues.training.values() if model in view.lanes), None)
    return _running(position) if trained is None else _training(position, trained.lanes[model], trained)


def _sampling(position: QueuePosition, view: SamplingView) -> Reason:
    ahead = view.ahead(position.session_id, position.future_id)
    if view.paused is not None:
        return Reason("paused_capacity", view.paused)
    if position.future_id in view.away:
        return Reason("paused_capacity", AWAY)
    if ahead is None:
        return _running(position)
    rate = view.per_second
    text = f"{counted(ahead, 'sample')} ahead of this one" if ahead else "next to be sampled"
    text = text if position.session_id in view.queued else f"at least {text}"
    return Reason("paused_capacity", text + (_about((ahead + 1) / rate) if rate else ""))


def _training(position: QueuePosition, lane: LaneView, view: TrainingView) -> Reason:
    if view.paused is not None:
        return Reason("paused_capacity", view.paused)
    if position.seq_id is None or position.seq_id < lane.next_seq:
        return _running(position)
    if lane.lowest > lane.next_seq:
        text = f"waiting for seq {lane.next_seq} of this model ({lane.lowest} has arrived)"
        return Reason("paused_capacity", text)
    if lane.held:
        return Reason("paused_capacity", HELD)
    if position.model_key in view.running:
        created = lane.next_seq == 1 and view.running_kind in _CREATIONS
        return Reason("active", CREATED if created else "earlier requests of this model are running")
    return Reason("paused_capacity", _queued(position.seq_id - lane.next_seq, lane.session_id, view))


def _running(position: QueuePosition) -> Reason:
    created = position.kind is RequestKind.LOAD_WEIGHTS and position.seq_id == 0
    return Reason("active", CREATED if created else _RUNNING.get(position.kind, "running"))


def _queued(earlier: int, session_id: str, view: TrainingView) -> str:
    """Count the work before a request: `earlier` requests of its model, and one unit of each tenant ahead."""
    tenants = view.tenants.index(session_id) if session_id in view.tenants else 0
    parts = [counted(earlier, "earlier request") + " of this model"] if earlier else []
    parts += [counted(tenants, "tenant")] if tenants else []
    text = f"{' and '.join(parts)} ahead" if parts else "next to run"
    units = tenants + bool(view.running)
    return text + (_about(units * view.unit_s) if view.unit_s and units else "")


def _about(seconds: float) -> str:
    return ", less than a second" if seconds < 1 else f", about {duration(seconds)}"
