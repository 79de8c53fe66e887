"""Forward and forward_backward: from stored bodies to response protobufs. Heavy parts run in threads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from skyrl_tinker.domain.values import Failure, ForwardBackward, PassItem, PassOutput, Usage
from skyrl_tinker.engine.outbox import failure_of, persistently
from skyrl_tinker.engine.scheduling.planner import Pass
from skyrl_tinker.engine.trainer.pass_items import ReadRow, References, attempt
from skyrl_tinker.protocol.protobuf import pass_results
from skyrl_tinker.store import stability_records
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.finish import FutureOutcome, FutureResult
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import off_loop
from skyrl_tinker.training.trainer_group import PassResult, PreparedPass, TrainerGroup

REPLAYED = "replayed_tokens:sum"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadyPass:
    """Pass with the batch of its runnable rows."""

    rows: tuple[QueuedRow, ...]
    requests: Mapping[int, ForwardBackward]  # requests that could be read, by row id
    refused: Mapping[int, Failure]  # failures of the other rows, by row id
    batch: PreparedPass | None  # None: no row can run
    sequences: frozenset[str]  # ids of sequences whose records it uses
    again: bool  # memory had run out
    replayed: Mapping[int, int]  # tokens with replayed experts, by row id; empty without router replay


class PassCoordinator:
    def __init__(self, store: Store, trainer: TrainerGroup, *, router_replay: bool = False) -> None:
        self._store = store
        self._trainer = trainer
        self._router_replay = router_replay

    async def prepare(self, unit: Pass, *, ended: bool = False) -> ReadyPass:
        """Make the batch; needs no rank, so it may run during the previous unit.

        `ended`: of requests that have finished, too.
        """
        ids = [row.id for row in unit.rows]
        bodies = await self._fetch(lambda conn: queue.read_bodies(conn, ids, ended=ended))
        size = sum(map(len, bodies.values()))
        read, unread = await off_loop(size, lambda: self._read(unit.rows, bodies))
        references = await self._references(read)
        size += references.records.nbytes
        batch, refused, replayed = await off_loop(size, lambda: self._build(read, references))
        used = (row.sequences for row_id, row in read.items() if row_id not in refused)
        requests = {row_id: row.request for row_id, row in read.items()}
        sequences = frozenset[str]().union(*used)
        return ReadyPass(unit.rows, requests, unread | refused, batch, sequences, unit.again, replayed)

    async def execute(self, ready: ReadyPass, row_budget: int | None = None) -> PassResult:
        """Return one output per row, in order. Raises TrainerError if the ranks are broken."""
        if ready.batch is None:
            return PassResult([ready.refused[row.id] for row in ready.rows], 0)
        result = await self._trainer.run_pass(ready.batch, row_budget)
        outputs = iter(result.outputs)
        return replace(
            result,
            outputs=[ready.refused.get(row.id) or _counted(next(outputs), row, ready) for row in ready.rows],
        )

    async def renew_records(self, ready: ReadyPass) -> None:
        """Postpone the expiry of the sequence records that the pass used."""
        if ready.sequences:
            renewal = partial(stability_records.renew, ids=ready.sequences)
            await persistently(self._store.write, renewal)

    async def _fetch(self, op: Op[T]) -> T:
        return await persistently(self._store.fetch, op)

    async def _references(self, read: Mapping[int, ReadRow]) -> References:
        rows = [row for row in read.values() if row.has_references]
        return await self._fetch(lambda conn: References.look_up(conn, rows)) if rows else References()

    def _read(
        self, rows: Sequence[QueuedRow], bodies: Mapping[int, bytes]
    ) -> tuple[dict[int, ReadRow], dict[int, Failure]]:
        read = partial(ReadRow.read, bodies=bodies, router_replay=self._router_replay)
        return _split({row.id: attempt(partial(read, row)) for row in rows})

    def _build(
        self, read: Mapping[int, ReadRow], references: References
    ) -> tuple[PreparedPass | None, dict[int, Failure], dict[int, int]]:
        items, refused = _split(
            {row_id: attempt(partial(references.item, row)) for row_id, row in read.items()}
        )
        batch, unfit = self._batch(items)
        replayed = {row_id: _replayed_tokens(item) for row_id, item in items.items() if self._router_replay}
        return batch, refused | unfit, replayed

    def _batch(self, items: Mapping[int, PassItem]) -> tuple[PreparedPass | None, dict[int, Failure]]:
        """Make the batch of all items or, if that fails, of those that form a batch alone."""
        if not items:
            return None, {}
        try:
            return self._trainer.prepare(list(items.values())), {}
        except Exception as error:  # becomes the result of the items at fault, or of all
            alone = {
                row_id: attempt(partial(self._trainer.prepare, [item])) for row_id, item in items.items()
            }
            _, unfit = _split(alone)
            if not unfit:
                return None, dict.fromkeys(items, failure_of(error))
        batch, more = self._batch({row_id: item for row_id, item in items.items() if row_id not in unfit})
        return batch, unfit | more


def _replayed_tokens(item: PassItem) -> int:
    return sum(int(datum.replayed.known.sum()) for datum in item.data if datum.replayed is not None)


def _counted(output: PassOutput | Failure, row: QueuedRow, ready: ReadyPass) -> PassOutput | Failure:
    """Add the metric of router replay, even if 0: the SDK drops metrics that some requests lack."""
    if isinstance(output, Failure) or row.id not in ready.replayed:
        return output
    return replace(output, metrics={**output.metrics, REPLAYED: float(ready.replayed[row.id])})


async def encode(outputs: Sequence[PassOutput | Failure]) -> list[FutureOutcome]:
    size = sum(
        logprobs.nbytes
        for output in outputs
        if isinstance(output, PassOutput)
        for logprobs in output.logprobs
    )
    return await off_loop(size, lambda: [attempt(partial(_encode, output)) for output in outputs])


def _encode(output: PassOutput | Failure) -> FutureOutcome:
    if isinstance(output, Failure):
        return output
    tokens = sum(len(logprobs) for logprobs in output.logprobs)
    result = pass_results.encode_forward_backward_output(output)
    return FutureResult(pass_results.PROTOBUF, result, usage=Usage(tokens), keep_body=True)


def _split(attempts: Mapping[int, T | Failure]) -> tuple[dict[int, T], dict[int, Failure]]:
    """Split into values and failures, by row id."""
    failures = {row_id: value for row_id, value in attempts.items() if isinstance(value, Failure)}
    values = {row_id: value for row_id, value in attempts.items() if not isinstance(value, Failure)}
    return values, failures
