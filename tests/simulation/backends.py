"""Trainer and samplers of a simulated engine: scripted, with exact arithmetic, slow, and mortal.

What a model was trained on shows in its losses, its files, and what a sampler draws from it.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import (
    Failure,
    LoraSpec,
    OptimizerFamily,
    PassItem,
    PassOutput,
    StepItem,
    StepOutput,
)
from skyrl_tinker.errors import SamplerError, StorageError, TrainerError, TrainerLostError
from skyrl_tinker.inference.client.http_connection import HttpAnswer
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.inference.servers.health_checks import Loss
from skyrl_tinker.protocol.queue_views import QueuesView
from skyrl_tinker.protocol.schemas.administration import ChangeBaseRequest
from skyrl_tinker.system.atomic_directory import storage_errors
from skyrl_tinker.training.trainer_group import PassResult
from tests.simulation.faults import AWAY, LOST, UNREAD, fault, point, prolonged, random_of_history, travel
from tests.simulation.virtual_loop import PROCESS
from tests.simulation.weight_ends import CapturedFull, Group, Receiver, Sender, hangs
from tests.support.scripted_replica import Draw, ScriptedReplica
from tests.support.scripted_trainer import CapturedSteps, CapturedWeights, ScriptedTrainer, Steps, steps_of

NOT_FINITE, DEADLY = 13, 14
"""First tokens of a pass whose loss is not finite, and of one that kills the ranks whenever it runs."""
CROWD = 3
"""Requests of a pass that does not fit into memory in rows of the usual size."""
ENDLESS = 50
"""Tokens to draw that a sampler never has."""
PROMPT = 3
"""Tokens of every prompt."""
TRANSFERS = frozenset(
    {
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    }
)
OF_SYNCS = TRANSFERS | {"/sleep", "/wake_up", "/reset_prefix_cache", "/update_weight_version"}
"""Calls of a sampler in a sync of full parameters."""
ROUTER = "http://router"


def drawn(steps: Steps) -> list[int]:
    """Return the tokens that a sampler draws from a model after these steps: none that ends a sequence."""
    return [1 + len(steps) % 511, 1 + crc32(json.dumps(steps).encode()) % 511]


def _logprob(tokens: Sequence[int]) -> float:
    """Return the logprob of every token of a prompt, for a model that draws these."""
    return -tokens[1] / 512


class Ranks(ScriptedTrainer):
    """Ranks of one base model, which send weights to `replicas`. Each call takes a second of their time.

    `further`: not of the first base model, without which the engine would end.

    `passed`: number and row budget of the call in which a pass, by model and seq_id, last left gradients.
    """

    def __init__(self, replicas: "Replicas", *, further: bool) -> None:
        super().__init__()
        self._further, self._lost = further, False
        self.passed: dict[tuple[ModelKey, int], tuple[int, int]] = {}
        self._replicas = replicas
        self.logprob_of = lambda model: _logprob(drawn(self._state(model).steps))
        self._standing: asyncio.Future[None] | None = None
        self._full: set[ModelKey] = set()
        self._factory: Any = None
        self._sender: Sender | None = None
        self._begun: set[asyncio.Future[Any]] = set()  # calls of the sender

    async def create_model(
        self, model: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily = "adamw"
    ) -> None:
        (self._full.discard if spec.rank else self._full.add)(model)
        await super().create_model(model, spec, optimizer)

    async def ready(self) -> None:
        """Be fresh ranks, after an end."""
        self._lost = False
        await self.restart()

    async def restart(self) -> None:
        if self._lost:
            raise TrainerLostError("the ranks die again and again")
        await super().restart()
        if self._factory is not None:
            await self.open_sender(self._factory)

    # What TrainerGroup offers to weight transports

    async def open_sender(self, factory: Any) -> None:
        self._factory = factory
        self._require_alive_now()
        self._sender = Sender(self._replicas.groups, hangs=hangs(factory))

    async def sender_call(self, method: str, *args: Any) -> list[Any]:
        return [await self.root_call(method, *args)]

    async def root_call(self, method: str, *args: Any) -> Any:
        self._require_alive_now()
        sender = self._sender
        assert sender is not None
        await travel(0.2)
        point("before a call of a sender")
        if fault("the ranks die in a sync"):
            raise self._break(f"killed before {method}")
        self._require_lives(sender)
        call = asyncio.ensure_future(getattr(sender, method)(*args))
        self._begun.add(call)
        try:
            await asyncio.wait((call,))
            self._require_lives(sender)
            value = call.result()
        finally:
            self._begun.discard(call)
            call.cancel()
        point("after a call of a sender")
        return value

    def lose(self) -> None:
        """End these ranks, with all that they have, until `restart`."""
        error = self._break("they have been ended")
        standing, self._standing = self._standing, None
        if standing is not None:
            standing.set_exception(error)
        self.trained.clear()

    def _require_alive_now(self) -> None:
        if self.broken is not None:
            raise self.broken

    def _require_lives(self, sender: Sender) -> None:
        self._require_alive_now()
        if sender is not self._sender:
            raise TrainerError("rank 0 died, and another one has taken its place")

    def _break(self, message: str) -> TrainerError:
        for call in self._begun:
            call.cancel()
        if self._sender is not None:
            self._sender.die()
        return super()._break(message)

    def _capture(self, kind: Callable[..., CapturedSteps], model: ModelKey) -> CapturedSteps:
        full = kind is CapturedWeights and model in self._full
        return super()._capture(partial(CapturedFull, ranks=self) if full else kind, model)

    async def _tell(self, what: str, value: Any) -> None:
        await travel(0.2)
        point("before a call of the ranks")
        if fault("the ranks die"):
            self._break("killed before a call")
        if self.broken is None and fault("the ranks stand still"):  # those that have ended cannot
            self._standing = asyncio.get_running_loop().create_future()
            await self._standing
        await super()._tell(what, value)

    async def _after(self) -> None:
        self.busy_s += 1.0
        point("after a call of the ranks")
        for away in (UNREAD, AWAY):
            prolonged(away)
        lost = self._further and fault(LOST)
        if lost or fault("the ranks die after a call"):
            self._lost = self._lost or lost
            raise self._break("killed after a call")

    async def watch(self, patience_s: float) -> None:
        standing, self._standing = self._standing, None
        if standing is not None:
            await asyncio.sleep(patience_s)
            standing.set_exception(self._break(f"a trainer process has not answered for {patience_s:.0f} s"))

    async def run_pass(self, items: Sequence[PassItem], row_budget: int | None = None) -> PassResult:
        result = await super().run_pass(items, row_budget)
        if DEADLY in map(_first_token, items) and not result.exhausted:
            raise self._break("killed by a pass")
        self.passed |= {
            (item.model, item.seq_id): (len(self.told), result.row_budget)
            for item, output in zip(items, result.outputs, strict=True)
            if item.backward and not isinstance(output, Failure)
        }
        await self._after()
        return result

    async def optim_step(self, steps: Sequence[StepItem]) -> list[StepOutput]:
        outputs = await super().optim_step(steps)
        await self._after()
        return outputs

    async def load_state(self, model: ModelKey, directory: str, *, optimizer: bool) -> None:
        if "weights" not in Path(directory).parts and fault("a snapshot cannot be read"):
            raise StorageError(f"checkpoint {directory} cannot be read: Stale file handle")
        with storage_errors(f"checkpoint {directory} cannot be read"):
            await super().load_state(model, directory, optimizer=optimizer)

    def _too_large(self, items: Sequence[PassItem], budget: int) -> bool:
        return budget == self.spec.token_budget and len(items) >= CROWD

    def _output(self, item: PassItem) -> PassOutput | Failure:
        if _first_token(item) == NOT_FINITE:
            return Failure("loss is not finite", "user")
        return super()._output(item)

    async def _write(self, captured: CapturedSteps, directory: Path) -> int:
        if fault("the ranks die while files are written"):
            raise self._break("killed while it wrote")
        return await super()._write(captured, directory)


def _first_token(item: PassItem) -> int:
    return int(item.data[0].tokens[0])


class Replicas:
    """The processes of samplers, one at a time for each number; their samples take `takes_s`.

    `of`: names their base model in URLs. `draw`: its tokens.
    """

    def __init__(
        self, takes_s: float, count: int = 1, *, of: str = "sampler", draw: Draw | None = None
    ) -> None:
        self._takes_s = takes_s
        self._of = of
        self._draw = draw or _rest
        self._lives = 0
        self._count = count
        self.groups: dict[str, Group] = {}  # of weight transports
        self.begin()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(each.url for each in self.running)

    def begin(self) -> None:
        """Start them all, fresh ones."""
        self.running = [self._start() for _ in range(self._count)]

    def lose(self) -> None:
        """End them all."""
        for each in self.running:
            each.lose()

    def _start(self) -> "_Sampler":
        self._lives += 1
        url = f"http://{self._of}-{self._lives}"
        return _Sampler(url, self._takes_s, Receiver(self.groups), self._draw)

    async def wait_lost(self, index: int) -> Loss:
        sampler = self.running[index]
        await asyncio.shield(sampler.lost)
        return Loss(index, sampler.url, "it has died")

    def suspect(self) -> None:
        """Check nothing: a death is noticed at once."""

    async def end(self, index: int) -> bool:
        self.running[index].lose()
        return True

    async def replace(self, index: int) -> str:
        await travel(2.0)
        self.running[index] = self._start()
        return self.running[index].url


class Router:
    """Router before several samplers, any of which gets a request."""

    url = ROUTER
    disaggregates = False

    def __init__(self, urls: Iterable[str]) -> None:
        self.workers = list(urls)

    def enough(self, urls: Sequence[str]) -> bool:
        return True

    async def start(self, urls: Sequence[str] = ()) -> None:
        """It never dies."""

    async def wait_died(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def add(self, url: str) -> None:
        await travel(0.1)
        self.workers.append(url)

    async def remove(self, url: str) -> None:
        await travel(0.1)
        if url in self.workers:
            self.workers.remove(url)


class _Sampler(ScriptedReplica):
    """A life of a sampler; `lost` when it has ended."""

    def __init__(self, url: str, takes_s: float, receiver: Receiver, draw: Draw) -> None:
        super().__init__(takes_s, draw=draw)
        self.url = url
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.receiver = receiver
        self.read = lambda directory: drawn(steps_of(directory))
        self.keep = lambda count: random_of_history().randint(0, max(0, count - 1))
        self._cached: list[Steps | None] = []  # steps of the weights of which it has cached the prompt

    def lose(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        self.receiver.leave()
        for running in self.running.values():
            if not running.done():
                running.set_exception(SamplerError("it has died meanwhile"))

    async def answer(self, path: str, body: Mapping[str, Any], params: Mapping[str, str]) -> Any:
        if path == "/reset_prefix_cache":
            self._cached.clear()
        if path not in TRANSFERS:
            return await super().answer(path, body, params)
        await self._until_lost(self.receiver.answer(path, body))
        self.version = body.get("weight_version", self.version)
        return {}

    async def _until_lost(self, work: Awaitable[None]) -> None:
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, self.lost), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise SamplerError("it has died meanwhile")
            working.result()
        finally:
            working.cancel()

    def held(self, model: str) -> Any:
        if model != BASE_MODEL:
            return super().held(model)
        if not self._cached:
            self._cached.append(self.receiver.steps)
        (steps,) = self._cached
        return None if steps is None else drawn(steps)

    async def _generate(self, body: Mapping[str, Any]) -> Any:
        if body["sampling_params"]["max_tokens"] != ENDLESS:
            held = self.held(body["model"])
            answer = await super()._generate(body)
            if "prompt_logprobs" in answer and held is not None:
                logprob = {"logprob": _logprob(held)}
                answer["prompt_logprobs"][1:] = [{str(token): logprob} for token in body["token_ids"][1:]]
            if body["model"] == BASE_MODEL and (steps := self.receiver.steps) is not None:
                for choice in answer["choices"]:
                    if choice["finish_reason"] != "abort" and choice["token_ids"]:
                        choice["token_ids"] = [*choice["token_ids"][:-1], drawn(steps)[1]]
            return answer
        name = f"generate-tokens-{body.get('request_id')}"
        running = self.running[name] = asyncio.get_running_loop().create_future()
        try:
            await running
        finally:
            self.running.pop(name, None)
        return {"choices": [self._choice(0, (), "abort")], "usage": {}, "model": body["model"]}


def _rest(tokens: Sequence[int] | None, prompt: Sequence[int], most: int) -> Sequence[int]:
    """Draw the tokens of an adapter that an aborted request has left; the base model has none."""
    return (tokens or ())[len(prompt) - PROMPT :]


class SamplerHttp:
    """Connections of an engine to its sampler."""

    def __init__(self, _: str) -> None:
        """Take the token, and ask for none."""

    async def request(
        self,
        method: str,
        url: str,
        *,
        json: Mapping[str, Any] | None = None,
        params: Any = None,
        **options: Any,
    ) -> HttpAnswer:
        process = PROCESS.get()
        assert process is not None
        await travel(0.1)
        path = url[url.index("/", len("http://")) :]
        if url.startswith(ROUTER):
            url = random_of_history().choice(process.router.workers or [ROUTER]) + path
        running = [each for replicas in process.fleets for each in replicas.running]
        sampler = next((each for each in running if url == each.url + path), None)
        sync = len(process.fleets[0].running) > 1 and path in OF_SYNCS
        point("before a call of a sampler")
        if sync:
            point("before a call of a sync")
        if sampler is not None and (fault("a sampler dies") or (sync and fault("a sampler dies in a sync"))):
            sampler.lose()
        if sampler is None or sampler.lost.done():
            raise SamplerError(f"{method} {url} failed: it is dead")
        ends = sync and path == "/finish_weight_update"  # where others may serve the new weights
        if ends and fault("an end of a sync is lost"):
            raise SamplerError(f"{method} {url} failed: no route to host")
        answer = await sampler.answer(path, json or {}, dict(params or ()))
        point("after a call of a sampler")
        if sync:
            point("after a call of a sync")
            if fault("a sampler dies after a call of a sync"):
                sampler.lose()
                raise SamplerError(f"{method} {url} failed: it died before its answer")
            if ends and fault("the answer to an end of a sync is lost"):
                raise SamplerError(f"{method} {url} failed: the connection broke")
        return HttpAnswer(answer, {})

    async def close(self) -> None:
        """Close nothing."""


class QueuesOnly:
    """The engine's HTTP server, without HTTP: the API reads the queues, an administrator changes bases."""

    def __init__(
        self,
        socket: Path,
        openai: object,
        metrics: object,
        replica_metrics: object,
        queues: Callable[[], QueuesView],
        change_base: Callable[[ChangeBaseRequest], str],
        size: int,
        network: None,
    ) -> None:
        self._queues = queues
        self._change_base = change_base
        self.address = None

    async def start(self) -> None:
        process = PROCESS.get()
        assert process is not None
        process.ready = True
        process.server.engine_queues = lambda: self._queues().to_bytes()
        process.server.change_base = self._change_base

    async def close(self) -> None:
        """Close nothing."""
