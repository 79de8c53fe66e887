"""What a request that is not done waits for, in words for the person who waits.

The SDK shows them, every minute at most, while the state is not "active": so that state is only of what is
being worked on.
"""

from dataclasses import dataclass

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.protocol.queue_views import LaneView, QueuesView, SamplingView, TrainingView
from skyrl_tinker.protocol.schemas.futures import QueueState
from skyrl_tinker.store.futures.cancellation import QueuePosition

CREATED = "the model is being created"
_AT_WORK = {
    RequestKind.CREATE_MODEL: CREATED,
    RequestKind.LOAD_WEIGHTS: "the weights are being loaded",
    RequestKind.SAVE_WEIGHTS: "its save is being written",
    RequestKind.SAVE_WEIGHTS_EXTERNAL: "its files are being written",
    RequestKind.SAVE_WEIGHTS_FOR_SAMPLER: "its weights are being brought to the samplers",
    RequestKind.UNLOAD_MODEL: "the requests before it are not done yet",
    RequestKind.SAMPLE: "it is being sampled",
}


@dataclass(frozen=True, slots=True)
class Reason:
    state: QueueState
    text: str | None


def reason(place: QueuePosition, queues: QueuesView) -> Reason:
    if place.kind is RequestKind.SAMPLE:
        return _sampling(place, queues.sampling)
    return _training(place, queues.training)


def _sampling(place: QueuePosition, view: SamplingView) -> Reason:
    ahead = view.ahead(place.session_id, place.future_id)
    if view.paused is not None:
        return Reason("paused_capacity", view.paused)
    if ahead is None:
        return _at_work(place)
    pace = view.per_second
    text = f"{_count(ahead, 'sample')} ahead of this one" if ahead else "it is the next to be sampled"
    return Reason("paused_capacity", text + (_about((ahead + 1) / pace) if pace else ""))


def _training(place: QueuePosition, view: TrainingView) -> Reason:
    lane = None if place.model_key is None else view.lanes.get(place.model_key)
    if lane is None or place.seq_id is None or place.seq_id < lane.next_seq:
        return _at_work(place)
    if lane.lowest > lane.next_seq:
        text = f"waiting for seq {lane.next_seq} of this model ({lane.lowest} is here)"
        return Reason("paused_capacity", text)
    if lane.held:
        return Reason("paused_capacity", "an earlier save of this model is being written")
    if place.model_key in view.running:
        return _behind_its_own(place, lane, view)
    return Reason("paused_capacity", _in_turn(place, lane, view))


def _at_work(place: QueuePosition) -> Reason:
    created = place.kind is RequestKind.LOAD_WEIGHTS and place.seq_id == 0
    return Reason("active", CREATED if created else _AT_WORK.get(place.kind, "it is being worked on"))


def _behind_its_own(place: QueuePosition, lane: LaneView, view: TrainingView) -> Reason:
    if lane.next_seq == 1 and view.running_kind in (RequestKind.CREATE_MODEL, RequestKind.LOAD_WEIGHTS):
        return Reason("active", CREATED)
    return Reason("active", "earlier requests of this model are being worked on")


def _in_turn(place: QueuePosition, lane: LaneView, view: TrainingView) -> str:
    assert place.seq_id is not None, "it stands in a lane"
    tenants = view.tenants.index(lane.session_id) if lane.session_id in view.tenants else 0
    earlier = place.seq_id - lane.next_seq
    parts = [_count(earlier, "earlier request") + " of this model"] if earlier else []
    parts += [_count(tenants, "tenant")] if tenants else []
    text = f"{' and '.join(parts)} ahead" if parts else "it is next in turn"
    turns = tenants + bool(view.running)
    return text + (_about(turns * view.unit_s) if view.unit_s and turns else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _about(seconds: float) -> str:
    if seconds < 1:
        return ", less than a second"
    if seconds < 120:
        return f", about {seconds:.0f} s"
    return f", about {seconds / 60:.0f} min"
