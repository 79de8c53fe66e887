"""Trainer and samplers of a simulated engine: scripted, with exact arithmetic, slow, and mortal.

What a model was trained on shows in its losses, its files, and what a sampler draws from it.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from skyrl_tinker.atomic_directory import storage_errors
from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import Failure, PassItem, PassOutput, StepItem, StepOutput
from skyrl_tinker.errors import SamplerError, StorageError
from skyrl_tinker.inference.client.http_connection import HttpAnswer
from skyrl_tinker.inference.servers.health_checks import Loss
from skyrl_tinker.protocol.queue_views import QueuesView
from skyrl_tinker.training.trainer_group import PassResult
from tests.simulation.faults import AWAY, UNREAD, fault, point, prolonged, random_of_history, travel
from tests.simulation.virtual_loop import PROCESS
from tests.support.scripted_replica import ScriptedReplica
from tests.support.scripted_trainer import CapturedSteps, ScriptedTrainer, Steps, steps_of

NOT_FINITE, DEADLY = 13, 14
"""First tokens of a pass whose loss is not finite, and of one that kills the ranks whenever it runs."""
CROWD = 3
"""Requests of a pass that does not fit into memory in rows of the usual size."""
ENDLESS = 50
"""Tokens to draw that a sampler never has."""
PROMPT = 3
"""Tokens of every prompt."""


def drawn(steps: Steps) -> list[int]:
    """Return the tokens that a sampler draws from a model after these steps: none that ends a sequence."""
    return [1 + len(steps) % 511, 1 + crc32(json.dumps(steps).encode()) % 511]


def _logprob(tokens: Sequence[int]) -> float:
    """Return the logprob of every token of a prompt, for a model that draws these."""
    return -tokens[1] / 512


class Ranks(ScriptedTrainer):
    """Ranks of one engine. Each call takes a second of their time."""

    def __init__(self) -> None:
        super().__init__()
        self.logprob_of = lambda model: _logprob(drawn(self._state(model).steps))
        self._standing: asyncio.Future[None] | None = None

    async def _tell(self, what: str, value: Any) -> None:
        await travel(0.2)
        point("before a call of the ranks")
        if fault("the ranks die"):
            self._break("killed before a call")
        if fault("the ranks stand still"):
            self._standing = asyncio.get_running_loop().create_future()
            await self._standing
        await super()._tell(what, value)

    async def _after(self) -> None:
        self.busy_s += 1.0
        point("after a call of the ranks")
        for away in (UNREAD, AWAY):
            prolonged(away)
        if fault("the ranks die after a call"):
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
    """The process of one sampler at a time, whose samples take `takes_s`."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self._lives = 0
        self._start()

    def _start(self) -> None:
        self._lives += 1
        self.url = f"http://sampler-{self._lives}"
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.server = _Sampler(self._takes_s, draw=_rest)
        self.server.read = lambda directory: drawn(steps_of(directory))
        self.server.keep = lambda count: random_of_history().randint(0, count - 1)

    def lose(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        for running in self.server.running.values():
            if not running.done():
                running.set_exception(SamplerError("it has died meanwhile"))

    async def wait_lost(self, index: int) -> Loss:
        await asyncio.shield(self.lost)
        return Loss(index, self.url, "it has died")

    def suspect(self) -> None:
        """Check nothing: a death is noticed at once."""

    async def end(self, index: int) -> bool:
        return True

    async def replace(self, index: int) -> str:
        await travel(2.0)
        self._start()
        return self.url


class _Sampler(ScriptedReplica):
    async def _generate(self, body: Mapping[str, Any]) -> Any:
        if body["sampling_params"]["max_tokens"] != ENDLESS:
            answer = await super()._generate(body)
            if "prompt_logprobs" in answer and body["model"] in self.adapters:
                logprob = {"logprob": _logprob(self.adapters[body["model"]])}
                answer["prompt_logprobs"][1:] = [{str(token): logprob} for token in body["token_ids"][1:]]
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
        replicas: Replicas = process.replicas
        await travel(0.1)
        point("before a call of a sampler")
        if fault("a sampler dies"):
            replicas.lose()
        if replicas.lost.done() or not url.startswith(f"{replicas.url}/"):
            raise SamplerError(f"{method} {url} failed: it is dead")
        path = url.removeprefix(replicas.url)
        answer = await replicas.server.answer(path, json or {}, dict(params or ()))
        point("after a call of a sampler")
        return HttpAnswer(answer, {})

    async def close(self) -> None:
        """Close nothing."""


class QueuesOnly:
    """The engine's HTTP server, without HTTP: the API reads the queues."""

    def __init__(
        self,
        socket: Path,
        openai: object,
        metrics: object,
        replica_metrics: object,
        queues: Callable[[], QueuesView],
        size: int,
        network: None,
    ) -> None:
        self._queues = queues
        self.address = None

    async def start(self) -> None:
        process = PROCESS.get()
        assert process is not None
        process.ready = True
        process.server.engine_queues = lambda: self._queues().to_bytes()

    async def close(self) -> None:
        """Close nothing."""
