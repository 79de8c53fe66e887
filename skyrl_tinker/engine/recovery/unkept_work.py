"""Work of models since their snapshots, in sums that tell the time of a replay without a look at each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl_tinker.domain.ids import Effect, ModelKey, RequestKind
from skyrl_tinker.engine.scheduling.row_work import model_of
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.replay import unit_records

NS = 1e9
MOST_DEARER = 10


@dataclass(slots=True)
class Unkept:
    """Work of a model since its snapshot. `clean_at`: the seq_id of its last step, 0 with gradients.

    `ranks_ns`: the ranks' time for it. `read_bytes`: of its forwards' bodies, which only readers need.
    """

    ranks_ns: int = 0  # whole, so that its sum over all models is exact
    requests: int = 0
    clean_at: int = 0
    read_bytes: int = 0

    @property
    def ready(self) -> bool:
        """True if there is work, and no gradients."""
        return self.ranks_ns > 0 and self.clean_at > 0


@dataclass(slots=True)
class MeanCost:
    """Mean seconds of a part of replay: an estimate at first, then corrected by measurements."""

    seconds: float
    times: int

    def note(self, seconds: float, times: int) -> None:
        """Add a measurement, capped at MOST_DEARER times the mean: a longer one includes other waits."""
        self.seconds += min(seconds, MOST_DEARER * self.mean_s * times)
        self.times += times

    @property
    def mean_s(self) -> float:
        return self.seconds / self.times


class UnkeptWork:
    def __init__(self) -> None:
        self.by_model: dict[ModelKey, Unkept] = {}
        self._all, self._awake = Unkept(), 0  # sum of their work, and how many have some
        self.of_model = MeanCost(2.0, 100)  # to create a model on fresh ranks, and load its snapshot
        self.of_request = MeanCost(0.5, 100)  # in addition to the ranks' own time: bodies, results, calls

    @property
    def replay_seconds(self) -> float:
        """Seconds that a replay of all models would take now."""
        return self._replay_s(self._all, self._awake)

    def replay_s_of(self, model: ModelKey) -> float:
        """Return the seconds that a replay of one model would take now."""
        return self._replay_s(self.by_model[model], 1)

    def _replay_s(self, ran: Unkept, models: int) -> float:
        """Return the seconds that a replay of work takes, of so many models that do not sleep."""
        return models * self.of_model.mean_s + ran.requests * self.of_request.mean_s + ran.ranks_ns / NS

    def ready(self) -> dict[ModelKey, Unkept]:
        """Return the models that have run something, and have no gradients now."""
        return {key: each for key, each in self.by_model.items() if each.ready}

    def reset(self) -> None:
        """Forget all work: a replay records it again."""
        self.by_model.clear()
        self._all, self._awake = Unkept(), 0

    def note(self, rows: Sequence[QueuedRow], effects: Mapping[int, Effect | None], seconds: float) -> None:
        """Record a unit's work, which took `seconds`."""
        nothing = None, Effect.LOADED  # without work to replay
        ran = [(row, effect) for row in rows if (effect := effects.get(row.id)) not in nothing]
        for row, effect in ran:
            work = self.by_model.setdefault(model_of(row), Unkept())
            self.add(work, 1, round(NS * seconds / len(ran)))
            work.clean_at = 0 if effect is Effect.GRADIENTS else row.seq_id or 0

    def add(self, to: Unkept, requests: int, ranks_ns: int) -> None:
        """Add work to that of a model."""
        self._awake += bool(requests and not to.requests)
        for each in (to, self._all):
            each.requests += requests
            each.ranks_ns += ranks_ns

    def begin(self, model: ModelKey, since: Unkept) -> None:
        """Replace the work of a model by that since a snapshot: none yet."""
        if (had := self.by_model.get(model)) is not None:
            self._awake -= bool(had.requests)
            self._all.requests -= had.requests
            self._all.ranks_ns -= had.ranks_ns
        self.by_model[model] = since

    def drop(self, model: ModelKey) -> None:
        """Forget the work of a model."""
        self.begin(model, Unkept())
        del self.by_model[model]

    def crowded(self, rows: Sequence[QueuedRow]) -> set[ModelKey]:
        """Count the bodies of a pass's forwards; return the models with more than stay for their readers."""
        most, found = unit_records.KEPT_BYTES, set[ModelKey]()
        for row in rows:
            if row.kind is RequestKind.FORWARD:
                work = self.by_model.setdefault(model_of(row), Unkept())
                work.read_bytes += max(row.body_bytes, most // unit_records.KEPT)
                if work.read_bytes > most:
                    work.read_bytes = 0
                    found.add(model_of(row))
        return found
