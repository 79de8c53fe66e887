"""Forward and forward_backward: stored bodies in, response protobufs out. Heavy parts run in threads."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from skyrl_tinker.domain.values import Failure, PassItem, PassOutput, Usage
from skyrl_tinker.engine.outbox import FutureResult, Outcome, failure_of, persistently
from skyrl_tinker.engine.scheduling.planner import Pass
from skyrl_tinker.engine.trainer.pass_items import Known, ReadRow, attempt
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.store import stability_records
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import PreparedPass, TrainerGroup

SMALL_BYTES = 64 << 10
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadyPass:
    """A pass whose batch is made, of the rows that can run."""

    rows: tuple[QueuedRow, ...]
    refused: Mapping[int, Failure]  # why the others cannot, by row id
    batch: PreparedPass | None  # None: no row can run
    sequences: frozenset[str]  # whose records it uses


class PassCoordinator:
    def __init__(self, store: Store, trainer: TrainerGroup) -> None:
        self._store = store
        self._trainer = trainer

    async def prepare(self, unit: Pass) -> ReadyPass:
        """Needs no worker, so it may run while they are busy with the unit before."""
        ids = [row.id for row in unit.rows]
        bodies = await self._fetch(lambda conn: queue.read_bodies(conn, ids))
        size = sum(map(len, bodies.values()))
        read, unread = await _off_loop(size, lambda: _read(unit.rows, bodies))
        known = await self._known(read)
        batch, refused = await _off_loop(size, lambda: self._build(read, known))
        used = (each.sequences for row_id, each in read.items() if row_id not in refused)
        return ReadyPass(unit.rows, unread | refused, batch, frozenset().union(*used))

    async def run(self, ready: ReadyPass) -> list[PassOutput | Failure]:
        """One output per row, in their order. TrainerError when the workers are broken."""
        outputs = iter([] if ready.batch is None else await self._trainer.run_pass(ready.batch))
        return [ready.refused.get(row.id) or next(outputs) for row in ready.rows]

    async def renew(self, ready: ReadyPass) -> None:
        """What was recorded of the sequences that it used lives on."""
        if ready.sequences:
            renewal = partial(stability_records.renew, ids=ready.sequences)
            await persistently(lambda: self._store.write(renewal))

    async def _fetch(self, op: Op[T]) -> T:
        return await persistently(lambda: self._store.fetch(op))

    async def _known(self, read: Mapping[int, ReadRow]) -> Known:
        referring = [each for each in read.values() if each.refers]
        return await self._fetch(lambda conn: Known.look_up(conn, referring)) if referring else Known()

    def _build(
        self, read: Mapping[int, ReadRow], known: Known
    ) -> tuple[PreparedPass | None, dict[int, Failure]]:
        items, refused = _apart({row_id: attempt(partial(known.item, each)) for row_id, each in read.items()})
        batch, unfit = self._batch(items)
        return batch, refused | unfit

    def _batch(self, items: Mapping[int, PassItem]) -> tuple[PreparedPass | None, dict[int, Failure]]:
        """If it cannot be made, of those that fit into one of their own."""
        if not items:
            return None, {}
        try:
            return self._trainer.prepare(list(items.values())), {}
        except Exception as error:  # becomes the result of those that do not fit, or of all
            alone = {
                row_id: attempt(partial(self._trainer.prepare, [item])) for row_id, item in items.items()
            }
            _, unfit = _apart(alone)
            if not unfit:
                return None, dict.fromkeys(items, failure_of(error))
        batch, more = self._batch({row_id: item for row_id, item in items.items() if row_id not in unfit})
        return batch, unfit | more


async def encode(outputs: Sequence[PassOutput | Failure]) -> list[Outcome]:
    size = sum(
        logprobs.nbytes for each in outputs if isinstance(each, PassOutput) for logprobs in each.logprobs
    )
    return await _off_loop(size, lambda: [attempt(partial(_encode, output)) for output in outputs])


def _encode(output: PassOutput | Failure) -> Outcome:
    if isinstance(output, Failure):
        return output
    tokens = sum(len(each) for each in output.logprobs)
    return FutureResult(
        pass_requests.PROTOBUF, pass_requests.encode_forward_backward_output(output), usage=Usage(tokens)
    )


def _read(
    rows: Sequence[QueuedRow], bodies: Mapping[int, bytes]
) -> tuple[dict[int, ReadRow], dict[int, Failure]]:
    return _apart({row.id: attempt(partial(ReadRow.read, row, bodies)) for row in rows})


def _apart(attempts: Mapping[int, T | Failure]) -> tuple[dict[int, T], dict[int, Failure]]:
    """What went well, and what did not, by row id."""
    failures = {row_id: each for row_id, each in attempts.items() if isinstance(each, Failure)}
    values = {row_id: each for row_id, each in attempts.items() if not isinstance(each, Failure)}
    return values, failures


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    """In a thread, unless it is so little (in bytes) that going there takes longer."""
    return work() if size <= SMALL_BYTES else await asyncio.to_thread(work)
