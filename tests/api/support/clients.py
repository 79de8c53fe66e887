"""The clients of a plan: what each of its requests looks like on the wire, and what they were told."""

import itertools
import uuid
from collections import defaultdict
from collections.abc import Callable

import httpx
import orjson

from tests.api.routes.test_losses import upload
from tests.api.support.passes import datum, protobuf
from tests.api.support.plans import BIRTHS, Event, Plan
from tests.api.support.world import BASE, Json, World, sample, step

PROTOBUF = "application/x-protobuf"
LOSS = upload("")
Key = tuple[int, int | None]
"""Key of a request: its lane and its place there, None for the lane's creation."""


class Clients:
    """All clients of one run of a plan; numbers are given out as the SDK does, in the order of its calls."""

    def __init__(self, plan: Plan, sessions: list[str], checkpoint: str) -> None:
        """`checkpoint`: a training state that all may load."""
        self.plan = plan
        self.sessions = sessions
        self.answers: defaultdict[Key, list[httpx.Response]] = defaultdict(list)
        self.refusals: list[httpx.Response] = []  # of intruders
        self.targets: defaultdict[Key, list[int]] = defaultdict(list)  # sampling numbers that a save sent
        self._checkpoint = checkpoint
        self._models, self._samplers, self._losses = ([itertools.count() for _ in sessions] for _ in range(3))
        self._numbers = {key: next(self._counter(*key)) for key in self._numbered()}
        self._keys: dict[Key, str] = {}

    async def send(self, api: World, event: Event) -> httpx.Response:
        path, content, kind = self._message(event)
        headers = {"Content-Type": kind, "X-Idempotency-Key": self._keys[event.lane, event.place]}
        return await api.http.post(path, content=content, headers=headers)

    def model_id(self, lane: int) -> str:
        return f"{self._session(lane)}:train:{self._numbers[lane, None]}"

    def kind(self, key: Key) -> str | None:
        """None of a birth."""
        number, place = key
        return None if place is None else self.plan.lanes[number].sent[place].kind

    def label(self, text: str) -> str:
        """Without what differs from run to run."""
        for number, session in enumerate(self.sessions):
            text = text.replace(session, f"session-{number}")
        return text

    # Numbers

    def _numbered(self) -> list[Key]:
        births: list[Key] = [(number, None) for number, lane in enumerate(self.plan.lanes) if lane.birth]
        losses = [(number, lane) for number, lane in enumerate(self.plan.lanes) if lane.kind == "losses"]
        return births + [(number, place) for number, lane in losses for place in range(len(lane.sent))]

    def _counter(self, lane: int, place: int | None) -> "itertools.count[int]":
        kind = self.plan.lanes[lane].kind
        counters = {"model": self._models, "sampler": self._samplers, "losses": self._losses}[kind]
        return counters[self.plan.lanes[lane].session]

    def _session(self, lane: int) -> str:
        return self.sessions[self.plan.lanes[lane].session]

    # Messages

    def _message(self, event: Event) -> tuple[str, bytes, str]:
        """Path, body, content type. Sent anew it has a new key, an ephemeral save a new sampling number."""
        key = event.lane, event.place
        anew = event.arrival.fresh or key not in self._keys
        if anew:
            self._keys[key] = uuid.uuid4().hex
        if event.sent.kind in ("ephemeral", "inflight") and (anew or not self.targets[key]):
            self.targets[key].append(next(self._samplers[self.plan.lanes[event.lane].session]))
        make: Callable[[Event], tuple[str, Json | bytes]] = {
            "model": self._birth if event.place is None else self._training,
            "sampler": self._sampler if event.place is None else self._sample,
            "losses": self._loss,
        }[self.plan.lanes[event.lane].kind]
        path, body = make(event)
        if isinstance(body, bytes):
            return path, body, PROTOBUF
        return path, orjson.dumps(body), "application/json"

    def _birth(self, event: Event) -> tuple[str, Json]:
        number = {"session_id": self._session(event.lane), "model_seq_id": self._numbers[event.lane, None]}
        assert event.sent.kind in BIRTHS
        if "from" in event.sent.kind:
            wrong = "-not" if event.sent.kind == "wrong_from" else ""
            return "load_weights", {**number, "path": self._checkpoint + wrong, "optimizer": True}
        rank = 1000 if event.sent.kind == "wrong_create" else 8
        return "create_model", {**number, "base_model": BASE, "lora_config": {"rank": rank}}

    def _training(self, event: Event) -> tuple[str, Json | bytes]:
        model, sent = self.model_id(event.lane), event.sent
        assert event.place is not None
        seq_id = event.place + 1
        place: Json = {"model_id": model, "seq_id": seq_id}
        if event.intrudes:
            return "optim_step", step(model, seq_id, learning_rate=0.5, beta1=0.123)
        if sent.kind in ("forward", "forward_backward", "wrong_pass"):
            return "forward_backward", self._pass(model, event)
        messages: dict[str, tuple[str, Json]] = {
            "optim_step": ("optim_step", step(model, seq_id, learning_rate=1e-3 * seq_id)),
            "wrong_step": ("optim_step", step(model, seq_id, learning_rate=-1.0)),
            "save": ("save_weights", {**place, "path": sent.name}),
            "save_over": ("save_weights", {**place, "path": sent.name, "overwrite": True}),
            "load": ("load_weights", {**place, "path": f"tinker://{model}/weights/{sent.name}"}),
            "external": ("save_weights_external", {**place, "path": sent.name}),
            "named": ("save_weights_for_sampler", {**place, "path": sent.name}),
            "ephemeral": ("save_weights_for_sampler", {**place, "kind": "snapshot", **self._target(event)}),
            "inflight": ("save_weights_for_sampler", {**place, "kind": "inflight", **self._target(event)}),
        }
        return messages[sent.kind]

    def _pass(self, model: str, event: Event) -> bytes:
        assert event.place is not None
        token = 511 if event.sent.kind == "wrong_pass" else event.place + 1
        tokens = datum([event.lane + 1, token, 7], [1.0, 1.0, 1.0])
        changes = {"loss_fn": "no_such_loss"} if event.sent.kind == "wrong_pass" else {}
        forward_only = event.sent.kind == "forward"
        return protobuf(model, event.place + 1, tokens, forward_only=forward_only, **changes)

    def _target(self, event: Event) -> Json:
        """The newest sampling number of an ephemeral save; nothing for others."""
        numbers = self.targets[event.lane, event.place]
        return {"sampling_session_seq_id": numbers[-1]} if numbers else {}

    def _sampler(self, event: Event) -> tuple[str, Json]:
        number = self._numbers[event.lane, None]
        body = {"session_id": self._session(event.lane), "sampling_session_seq_id": number}
        return "create_sampling_session", {**body, "base_model": BASE}

    def _sample(self, event: Event) -> tuple[str, Json]:
        assert event.place is not None
        sampler = f"{self._session(event.lane)}:sample:{self._numbers[event.lane, None]}"
        seq_id = self.plan.lanes[event.lane].clone + event.place
        prompt = [event.lane + 1, event.place + 1]
        if event.sent.kind == "wrong_sample":
            prompt = [10**6]
        elif event.intrudes:
            prompt = [500]
        count = 1 + event.place % 2
        chunks = {"prompt": {"chunks": [{"tokens": prompt}]}, "num_samples": count}
        return "asample", sample(sampler, seq_id, **chunks)

    def _loss(self, event: Event) -> tuple[str, Json]:
        number = self._numbers[event.lane, event.place]
        body = {**LOSS, "session_id": self._session(event.lane), "custom_loss_seq_id": number}
        if event.sent.kind == "wrong_loss":
            body["inputs"] = []
        return "create_custom_loss", body | ({"name": "intruder"} if event.intrudes else {})
