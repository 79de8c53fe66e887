"""Sampling: many requests in flight, which never wait for training."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import InitVar, dataclass, replace
from functools import partial

import numpy as np
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import (
    ALL_OWNERS,
    ModelKey,
    OwnerId,
    SamplingSessionId,
    SessionId,
    VersionId,
    openai_session,
    sequence_ids,
)
from skyrl_tinker.domain.samples import SampleOutput, SampleRequest
from skyrl_tinker.domain.units import KiB
from skyrl_tinker.domain.values import Usage, WeightVersion
from skyrl_tinker.engine.outbox import Outbox, failure_of, persistently
from skyrl_tinker.engine.sampler.inflight_targets import KnownSources, SampleSource
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.scheduling.listing import Listing
from skyrl_tinker.engine.scheduling.priorities import share_of
from skyrl_tinker.engine.scheduling.sample_queue import SampleQueue
from skyrl_tinker.engine.scheduling.slots import Concurrency, SampleTurn, Slots
from skyrl_tinker.engine.scheduling.throughput import EndRate
from skyrl_tinker.engine.telemetry.engine_metrics import OPENAI, Metrics
from skyrl_tinker.errors import StateLostError, StorageAwayError
from skyrl_tinker.inference.constants import LONE_SEQUENCES, MAX_SEQUENCES
from skyrl_tinker.protocol.protobuf import pass_results, sample_results
from skyrl_tinker.protocol.queue_views import SHOWN, SamplingView
from skyrl_tinker.protocol.stored_requests import sample_from_body
from skyrl_tinker.store import sampling_sessions, session_records, weight_versions
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.finish import FutureOutcome, FutureResult
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.sampling_sessions import SamplingSessionRow
from skyrl_tinker.store.stability_records import RoutingRecord, SequenceRecord
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import OFF_LOOP_BYTES, off_loop

BATCH = 256  # bodies read in one transaction
CACHED_SESSIONS = 1 << 16
KEPT_BYTES = 32 * KiB
"""Largest body of a sample that stays with its result, so that its prompt can be read."""
LISTED_BYTES = 8  # of a token and its logprob
_SHARED = {"cuda": MAX_SEQUENCES, "cpu": 96}
CONCURRENCY = {device: Concurrency(_SHARED[device], alone) for device, alone in LONE_SEQUENCES.items()}
"""Default of the setting sample_concurrency. On a CPU a step takes longer with more sequences."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Guest:
    """Request of an OpenAI client, which is not in the store."""

    id: int
    owner_id: OwnerId | None
    session_id: SessionId
    tokens: int
    sequences: int
    model_key: ModelKey | None = None


@dataclass(eq=False)
class SamplerDriver:
    """Driver of one base model's samples. `concurrency`: of sequences in flight; other bodies stay stored.

    `router_replay`: record experts for samples that are recorded.
    """

    _store: Store
    _samplers: Samplers
    _outbox: Outbox
    concurrency: InitVar[Concurrency]
    _metrics: Metrics
    router_replay: bool = False

    def __post_init__(self, concurrency: Concurrency) -> None:
        self.facts = self._samplers.facts
        self._tasks: dict[int, asyncio.Task[None]] = {}  # in flight, by future id
        self._starting: set[int] = set()  # their bodies are being read
        self._queued = SampleQueue(Slots(concurrency, lambda: self._samplers.cores))
        self._guests = itertools.count(-1, -1)  # ids that no future has
        self._arriving = 0  # guests ahead of their turns
        self._awaited: dict[int, asyncio.Future[None]] = {}  # turns awaited by tasks, by id
        self._away: dict[int, None] = {}  # future ids; the storage of their weights did not answer
        self._listing = Listing(lambda: self._queued.view(self._away))
        self._ends = EndRate()
        self._changed = asyncio.Event()  # rows have arrived, or requests have finished
        self._sources = KnownSources(CACHED_SESSIONS)
        self._looking_up = asyncio.Lock()
        self._dropped: set[VersionId] = set()  # while the store is asked for a source

    def submit(self, rows: Sequence[QueuedRow]) -> None:
        self._queued.add(rows)
        self._changed.set()

    def queued(self) -> int:
        """Count the requests that wait for a free slot."""
        return len(self._queued)

    def in_flight(self) -> int:
        """Count the requests that the samplers have."""
        return self._queued.in_flight()

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Count a request as waiting until it asks for its turn."""
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    @asynccontextmanager
    async def turn(self, owner: OwnerId | None, tokens: int, sequences: int) -> AsyncIterator[None]:
        """Wait for a turn among the samples, and hold it; `tokens`: most tokens that are computed in it."""
        began = time.monotonic()
        guest = _Guest(next(self._guests), owner, openai_session(owner), tokens, sequences)
        await self._await_turn(guest)
        try:
            self._metrics.waited(OPENAI, time.monotonic() - began)
            yield
        finally:
            self._note_end(guest.id)

    async def _await_turn(self, turn: SampleTurn) -> None:
        """Queue a turn and return once it has come."""
        come = self._awaited[turn.id] = asyncio.get_running_loop().create_future()
        self._queued.add([turn])
        self._changed.set()
        try:
            await come
        except asyncio.CancelledError:
            self._queued.discard({turn.id})
            self._give_back(turn.id)  # it may just have begun
            raise
        finally:
            del self._awaited[turn.id]

    def drop(self, future_ids: Collection[int]) -> None:
        """Have the samplers abort those of these samples that are in flight, and never get the others."""
        self._queued.discard(future_ids)
        self._starting.difference_update(future_ids)
        for task in [self._tasks[future_id] for future_id in future_ids if future_id in self._tasks]:
            task.cancel()  # the sampler aborts its request

    def view(self) -> SamplingView:
        """Return the queues, at most LISTED_S old, and how many samples wait and end."""
        waiting = replace(
            self._listing.get(),
            waiting=len(self._queued) + self._arriving,
            in_flight=self.in_flight(),
            per_second=self._ends.per_second(),
            away=tuple(itertools.islice(self._away, SHOWN)),
        )
        return self._samplers.view(waiting)

    def forget_sources(self, version: WeightVersion) -> None:
        """Look up the weights of the sessions on this version again: it was dropped."""
        self._sources.forget(version)
        if self._looking_up.locked():
            self._dropped.add(version.id)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                rows = await self._next_rows()
                self._starting = {row.id for row in rows}
                for row, body in await self._with_bodies(rows):
                    if row.id in self._starting:
                        self._start(tasks, row, body)
                self._queued.release(row.id for row in rows if row.id not in self._tasks)

    def _start(self, tasks: asyncio.TaskGroup, row: QueuedRow, body: bytes) -> None:
        task = self._tasks[row.id] = tasks.create_task(self._finish(row, body))
        task.add_done_callback(lambda _: self._note_end(row.id))

    def _note_end(self, turn_id: int) -> None:
        self._tasks.pop(turn_id, None)
        self._ends.record()
        self._give_back(turn_id)

    def _give_back(self, turn_id: int) -> None:
        self._queued.release([turn_id])
        self._changed.set()

    async def _next_rows(self) -> list[QueuedRow]:
        """Wait for turns; return the rows that may begin, and wake the tasks whose turn has come."""
        while True:
            turns = self._queued.take(BATCH)
            for turn in turns:
                come = self._awaited.get(turn.id)
                if come is not None and not come.done():  # it may just have been cancelled
                    come.set_result(None)
            new = (turn for turn in turns if turn.id not in self._awaited)
            if rows := [turn for turn in new if isinstance(turn, QueuedRow)]:
                return rows
            if not turns:
                self._changed.clear()
                await self._changed.wait()

    async def _with_bodies(self, batch: Sequence[QueuedRow]) -> list[tuple[QueuedRow, bytes]]:
        """Pair rows with their bodies, without the rows that have finished."""
        stored = await self._read_bodies([row for row in batch if row.body is None])
        pairs = [(row, row.body or stored.get(row.id)) for row in batch]
        return [(row, body) for row, body in pairs if body is not None]

    async def _read_bodies(self, rows: Sequence[QueuedRow]) -> dict[int, bytes]:
        """Read bodies by future id, in a thread where they are large."""
        read = partial(queue.read_bodies, ids=[row.id for row in rows])
        if not rows:
            return {}
        if sum(row.body_bytes for row in rows) > OFF_LOOP_BYTES:
            return await persistently(self._store.fetch, read)
        return await persistently(self._store.read, read)

    async def _finish(self, row: QueuedRow, body: bytes) -> None:
        began_at = self._store.now()
        self._metrics.began([row], began_at)
        replicas: list[str] = []
        outcome = await self._outcome(row, body, replicas)
        self._metrics.activity.sample(row.id, began_at, replicas)
        await self._outbox.send([(row.id, outcome)])

    async def _outcome(self, row: QueuedRow, body: bytes, replicas: list[str]) -> FutureOutcome:
        """Sample; `replicas` is filled with the addresses of the replicas that answered."""
        try:
            assert row.sampling_session_id is not None
            async with self._samplers.gate.passage():
                source = await self._source(row.sampling_session_id)
                request = await off_loop(len(body), lambda: self._read(body))
                output = await self._sample(row, source, request)
            replicas.extend(output.replicas)
            lengths = [len(sequence.tokens) for sequence in output.sequences]
            sampled = sum(lengths[: request.sequences])  # the others are copies
            self._metrics.sampled(self.facts.name, sampled, row.owner_id)
            records = _records(row, request, output) if request.record_stability_info else ()
            usage = Usage(len(request.prompt), output.cached_tokens, sampled)
            listed = request.listed + sum(lengths) * (1 + request.topk_sample_logprobs)
            result = await off_loop(
                LISTED_BYTES * listed, lambda: sample_results.encode_sample_response(output)
            )
            kept = len(body) <= KEPT_BYTES
            return FutureResult(pass_results.PROTOBUF, result, records, usage, keep_body=kept)
        except Exception as error:  # of samplers, storage or store, or unforeseen: this request's result
            return failure_of(error)

    async def _sample(self, row: QueuedRow, source: SampleSource, request: SampleRequest) -> SampleOutput:
        """Sample. If the weights' storage is away, other samples use the turn until the files are here."""
        share = share_of(row.owner_id, row.session_id)
        while True:  # the files may leave the cache again
            try:
                return await self._samplers.sample(source, request, share)
            except StateLostError as error:
                raise await self._or_parked(row, error) from error
            except StorageAwayError as error:
                _log.warning("request %s waits: %s", row.request_id, error)
            self._give_back(row.id)
            self._away[row.id] = None
            try:
                await self._samplers.await_files(source, share)
                await self._await_turn(replace(row, tokens=0))  # they were charged for the first turn
            finally:
                del self._away[row.id]

    async def _or_parked(self, row: QueuedRow, error: StateLostError) -> StateLostError:
        """Return the error of files that are gone: a start that brings a parked model back may make them."""
        assert row.sampling_session_id is not None
        find = partial(sampling_sessions.why_parked, session=row.sampling_session_id)
        reason = await persistently(self._store.read, find)
        return error if reason is None else StateLostError(f"{reason}; its unnamed weights may come with it")

    def _read(self, body: bytes) -> SampleRequest:
        request = sample_from_body(body)
        recorded = self.router_replay and request.record_stability_info
        return replace(request, routed_experts=True) if recorded else request

    async def _source(self, session: SamplingSessionId) -> SampleSource:
        """Return the weights of this sampling client. Raises GoneError once its session is over."""
        if session in self._sources:
            return self._sources[session]
        async with self._looking_up:  # only one of a new session's samples asks the store
            while session not in self._sources:
                self._dropped.clear()
                find = partial(_session_version, session=session)
                row, version = await persistently(self._store.read, find)
                if version is not None and version.id in self._dropped:
                    continue
                if version is not None and row.follows is not None:
                    self._sources.add(session, self._samplers.target(row.follows, version))
                else:
                    self._sources.add(session, version)
            return self._sources[session]


def _records(row: QueuedRow, request: SampleRequest, output: SampleOutput) -> tuple[SequenceRecord, ...]:
    ids = sequence_ids(row.request_id, len(output.sequences))
    prompt = np.asarray(request.prompt, np.int32)
    return tuple(
        SequenceRecord(
            sequence_id,
            np.asarray(sequence.tokens, np.int32),
            np.asarray(sequence.logprobs, np.float32),
            len(prompt),
            None if sequence.routed_experts is None else RoutingRecord(prompt, sequence.routed_experts),
        )
        for sequence_id, sequence in zip(ids, output.sequences, strict=True)
    )


def _session_version(
    conn: Connection, session: SamplingSessionId
) -> tuple[SamplingSessionRow, WeightVersion | None]:
    """Read the session and its version, None for the base model."""
    row = sampling_sessions.require(conn, ALL_OWNERS, session)
    if row.version_id is None:
        return row, None
    if row.follows is not None:
        version = weight_versions.newest_inflight(conn, row.follows)
    else:
        version = weight_versions.published_version(conn, row.version_id)
    if version is None:
        session_records.require_live(conn, row.session_id)
        raise StateLostError(
            f"the weights of sampling session {session} have expired (settings ephemeral.keep and "
            "ephemeral.idle_s): save them again"
        )
    return row, version
