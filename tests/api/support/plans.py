"""Plans of what clients of a server do, and what a bad network makes of it.

A plan is a set of lanes: models, sampling clients, uploads of losses. Each request of a lane arrives at least
once, late, perhaps again, perhaps at another API process, and some of its arrivals are broken off.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hypothesis import strategies as st

APIS = 2
SESSIONS = 2
PASSES = ("forward", "forward_backward", "wrong_pass")
SAVES = ("save", "save_over", "external", "named", "ephemeral", "inflight")
BARRIERS = ("optim_step", "wrong_step", "load", *SAVES)
BIRTHS = ("create", "create_from", "wrong_create", "wrong_from")
CLONES = (0, 7 * 10**9, 10**18)


@dataclass(frozen=True)
class Arrival:
    """`delay`: by how many later requests it is overtaken. `fresh`: sent anew, with another idempotency key.
    `cut`: the connection breaks after so many turns of the loop, and no response comes."""

    delay: int
    api: int
    fresh: bool
    cut: int | None = None


@dataclass(frozen=True)
class Sent:
    """`name`: which of a few it saves or loads. `last`: a whole one, None if the client never sends it.
    `intruder`: the delay of another request with the same number, which comes when this one is there."""

    kind: str
    name: str
    early: tuple[Arrival, ...]
    last: Arrival | None
    intruder: int | None = None

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        return (*self.early, self.last) if self.last else ()

    @property
    def there(self) -> int:
        """The delay after which it was answered at least once."""
        return min(each.delay for each in self.arrivals if each.cut is None)


@dataclass(frozen=True)
class Lane:
    """`birth` None: a sampling client or uploads, which need no model. `clone`: its first seq_id."""

    kind: str  # model | sampler | losses
    session: int
    birth: Sent | None
    sent: tuple[Sent, ...]
    clone: int = 0

    @property
    def made(self) -> bool:
        """True if the lane has a model, which runs what is sent."""
        return self.birth is not None and self.birth.kind in ("create", "create_from")

    @property
    def missing(self) -> int:
        """The first place that stays empty: nothing of a model ends from there on."""
        gaps = [place for place, each in enumerate(self.sent) if each.last is None and self.made]
        return min(gaps, default=len(self.sent))


@dataclass(frozen=True)
class Plan:
    """`restarts`: (round, API process)."""

    lanes: tuple[Lane, ...]
    restarts: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Event:
    """An arrival of the request at `place` (None: the birth) of lane number `lane`."""

    lane: int
    place: int | None
    sent: Sent
    arrival: Arrival
    intrudes: bool = False


def rounds(plan: Plan) -> list[list[Event]]:
    """Batches that arrive together, in order. A lane's requests begin once its creation is answered."""
    found: defaultdict[int, list[Event]] = defaultdict(list)
    for number, lane in enumerate(plan.lanes):
        for time, event in _events(number, lane):
            found[time].append(event)
    return [found[time] for time in range(max(found, default=-1) + 1)]


def _events(number: int, lane: Lane) -> Iterator[tuple[int, Event]]:
    begin = 0
    if lane.birth is not None:
        yield from ((each.delay, Event(number, None, lane.birth, each)) for each in lane.birth.arrivals)
        begin = lane.birth.there + 1
    for place, sent in enumerate(lane.sent):
        for each in sent.arrivals:
            yield begin + place + each.delay, Event(number, place, sent, each)
        if sent.intruder is not None and sent.last is not None:
            late = Arrival(sent.there + 1 + sent.intruder, sent.last.api, fresh=True)
            yield begin + place + late.delay, Event(number, place, sent, late, intrudes=True)


def plain(plan: Plan) -> Plan:
    """The same requests, each once, one after another."""
    lanes = [
        replace(lane, birth=lane.birth and _once(lane.birth), sent=tuple(map(_once, lane.sent)))
        for lane in plan.lanes
    ]
    return Plan(tuple(lanes), frozenset())


def _once(sent: Sent) -> Sent:
    last = sent.last and Arrival(0, 0, fresh=True)
    return replace(sent, early=(), last=last, intruder=None)


def computed(lane: Lane) -> list[tuple[str, int | None]]:
    """Work that a model's lane gives the trainer, with the seq_id. A refused pass spoils its window."""
    if not lane.made:
        return []
    found: list[tuple[str, int | None]] = []
    saved, spoilt = set(), False
    for seq_id, sent in enumerate(lane.sent[: lane.missing], 1):
        if sent.kind in ("forward", "forward_backward"):
            found.append(("pass", seq_id))
        elif sent.kind in ("optim_step", "wrong_step"):
            wrong = spoilt or sent.kind == "wrong_step"
            found.append(("zero", None) if wrong else ("step", seq_id))
        if sent.kind in ("save", "save_over"):
            saved.add(sent.name)
        clears = sent.kind in ("optim_step", "wrong_step") or (sent.kind == "load" and sent.name in saved)
        spoilt = (spoilt and not clears) or sent.kind == "wrong_pass"
    return found


def drawn(plan: Plan) -> list[tuple[int, int]]:
    """Lane and place, from 1, of the samples that are none of them wrong."""
    return [
        (number, place)
        for number, lane in enumerate(plan.lanes, 1)
        for place, sent in enumerate(lane.sent, 1)
        if sent.kind == "sample"
    ]


_delays = st.integers(0, 6)
_apis = st.integers(0, APIS - 1)
_cuts = st.none() | st.sampled_from([0, 1, 2, 5, 20, 100])
_early = st.lists(st.builds(Arrival, _delays, _apis, st.booleans(), _cuts), max_size=3).map(tuple)
_whole = st.builds(Arrival, _delays, _apis, st.booleans())
_sessions = st.integers(0, SESSIONS - 1)


def _requests(*kinds: str) -> st.SearchStrategy[Sent]:
    return st.builds(
        Sent, st.sampled_from(kinds), st.sampled_from("ab"), _early, _whole, st.none() | st.integers(0, 4)
    )


def _births(*kinds: str) -> st.SearchStrategy[Sent]:
    return st.builds(Sent, st.sampled_from(kinds), st.just(""), _early, _whole)


_gap = st.just(Sent("gap", "", (), None))
_training = st.lists(st.one_of(_requests(*PASSES), _requests(*BARRIERS), _requests(*PASSES)), max_size=8)


@st.composite
def _trainings(draw: st.DrawFn) -> tuple[Sent, ...]:
    """One in a few has a gap, which a poisoned client leaves."""
    sent = draw(_training)
    if draw(st.integers(0, 3)) == 3:
        sent.insert(draw(st.integers(0, len(sent))), draw(_gap))
    return tuple(sent)


_models = st.builds(Lane, st.just("model"), _sessions, _births(*BIRTHS, "create", "create"), _trainings())
_samplers = st.builds(
    Lane,
    st.just("sampler"),
    _sessions,
    _births("sampler"),
    st.lists(_requests("sample", "sample", "wrong_sample"), max_size=4).map(tuple),
    st.sampled_from(CLONES),
)
_losses = st.builds(
    Lane,
    st.just("losses"),
    _sessions,
    st.none(),
    st.lists(_requests("loss", "wrong_loss"), max_size=2).map(tuple),
)
plans = st.builds(
    Plan,
    st.lists(st.one_of(_models, _models, _samplers, _losses), min_size=1, max_size=5).map(tuple),
    st.frozensets(st.tuples(st.integers(0, 12), _apis), max_size=2),
)
