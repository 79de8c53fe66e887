"""Forward and forward_backward: stored bodies in, response protobufs out. Heavy parts run in threads."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from skyrl_tinker.engine.answers import Answer, Outcome, failure_of
from skyrl_tinker.engine.planner import Pass
from skyrl_tinker.store import futures
from skyrl_tinker.store.futures import QueuedRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.group import PreparedPass, TrainerGroup
from skyrl_tinker.wire import codec
from skyrl_tinker.wire.ids import RequestKind
from skyrl_tinker.wire.values import Failure, PassItem, PassOutput

SMALL_BYTES = 64 << 10
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadyPass:
    """A pass whose batch is made, or why it could not be."""

    rows: tuple[QueuedRow, ...]
    batch: PreparedPass | Failure


class PassRunner:
    def __init__(self, store: Store, trainer: TrainerGroup) -> None:
        self._store = store
        self._trainer = trainer

    async def prepare(self, unit: Pass) -> ReadyPass:
        """Needs no worker, so it may run while they are busy with the unit before."""
        ids = [row.id for row in unit.rows]
        bodies = await self._store.fetch(lambda conn: futures.bodies(conn, ids))
        size = sum(map(len, bodies.values()))
        try:
            batch = await _off_loop(size, lambda: self._trainer.prepare(_items(unit.rows, bodies)))
            return ReadyPass(unit.rows, batch)
        except Exception as error:  # becomes the result of these requests
            return ReadyPass(unit.rows, failure_of(error))

    async def run(self, ready: ReadyPass) -> list[PassOutput | Failure]:
        """One output per row, in their order. TrainerError when the workers are broken."""
        if isinstance(ready.batch, Failure):
            return [ready.batch] * len(ready.rows)
        return await self._trainer.run_pass(ready.batch)


async def encode(outputs: Sequence[PassOutput | Failure]) -> list[Outcome]:
    size = sum(
        logprobs.nbytes for each in outputs if isinstance(each, PassOutput) for logprobs in each.logprobs
    )
    return await _off_loop(size, lambda: [_encode(output) for output in outputs])


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    """In a thread, unless it is so little (in bytes) that going there takes longer."""
    return work() if size <= SMALL_BYTES else await asyncio.to_thread(work)


def _encode(output: PassOutput | Failure) -> Outcome:
    if isinstance(output, Failure):
        return output
    try:
        return Answer(codec.PROTOBUF, codec.encode_forward_backward_output(output))
    except Exception as error:  # becomes the result of this request
        return failure_of(error)


def _items(rows: Sequence[QueuedRow], bodies: Mapping[int, bytes]) -> list[PassItem]:
    return [_item(row, bodies[row.id]) for row in rows]


def _item(row: QueuedRow, body: bytes) -> PassItem:
    assert row.model_key is not None
    request = codec.from_canonical(body)
    return PassItem(
        request_id=row.request_id,
        model=row.model_key,
        data=request.data,
        loss_fn=request.loss_fn,
        loss_config=request.loss_config,
        backward=row.kind is RequestKind.FORWARD_BACKWARD,
    )
