"""What requests refer to, and requests that do, written straight into the store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl_tinker.domain.ids import ModelId, RequestKind, SessionId
from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.domain.values import CustomLoss, Failure, ProvenanceSpan
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.store import sampling_sessions
from skyrl_tinker.store.custom_losses import NewLoss
from skyrl_tinker.store.futures import queue, sample_submission, training_submission
from skyrl_tinker.store.futures.finish import FutureResult, finish_all
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.sample_submission import NewSample
from skyrl_tinker.store.stability_records import RoutingRecord, SequenceRecord
from skyrl_tinker.store.store import Store
from tests.engine.support import journal
from tests.support.reads import reading


async def submit_sample(store: Store, session: SessionId, number: int = 0) -> Accepted:
    """Of one sequence, not sampled yet."""
    sampler = await store.write(
        lambda conn: sampling_sessions.create(
            conn, session, number, base_model="tiny", model_path=None, version_id=None
        )
    )
    return await store.write(
        lambda conn: sample_submission.submit_sample(conn, NewSample(sampler, 0, b"", b"", 1, 1, 1), None)
    )


async def finish_sample(store: Store, accepted: Accepted, outcome: FutureResult | Failure) -> str:
    """Returns the sequence's id."""
    future_id = (await journal.outcome(store, accepted)).future_id
    await store.write(lambda conn: finish_all(conn, {future_id: outcome}))
    return accepted.sequence_ids[0]


async def sampled(
    store: Store,
    session: SessionId,
    tokens: Sequence[int],
    prompt_length: int,
    number: int = 0,
    *,
    routing: RoutingRecord | None = None,
) -> SequenceRecord:
    """Its logprobs are -1/8, -2/8, ... of the number of the sampler."""
    accepted = await submit_sample(store, session, number)
    logprobs = (np.arange(-1, -len(tokens) - 1, -1) / 8 - number).astype(np.float32)
    name = accepted.sequence_ids[0]
    record = SequenceRecord(name, np.array(tokens, np.int32), logprobs, prompt_length, routing)
    await finish_sample(store, accepted, FutureResult("application/json", b"{}", (record,)))
    return record


@dataclass(frozen=True)
class Example:
    """A datum: `tokens` has one more than it has positions. Advantages are 1, on prompts 0 unless `loud`."""

    tokens: tuple[int, ...]
    spans: tuple[ProvenanceSpan, ...]
    loud: bool = False
    input_spans: tuple[ProvenanceSpan, ...] = ()

    def message(self, loss_fn: str) -> pb.Datum:
        datum = pb.Datum()
        datum.model_input.add().encoded_text.tokens = np.array(self.tokens[:-1], "<i4").tobytes()
        targets = np.array(self.tokens[1:], "<i8")
        datum.loss_fn_inputs["target_tokens"].CopyFrom(_tensor(targets, pb.DTYPE_INT64))
        silent = [not span.sampled and not self.loud for span in self.spans for _ in range(span.length)]
        advantages = np.ones(len(targets), "<f4")
        advantages[np.flatnonzero(silent)] = 0.0
        datum.loss_fn_inputs["advantages"].CopyFrom(_tensor(advantages, pb.DTYPE_FLOAT32))
        if LOSSES[loss_fn].inputs[:1] == ("logprobs",):
            datum.loss_fn_inputs["logprobs"].CopyFrom(_tensor(-advantages, pb.DTYPE_FLOAT32))
        _add(datum.loss_fn_input_spans, self.spans)
        _add(datum.model_input_spans, self.input_spans)
        return datum


def _add(field: Any, spans: Sequence[ProvenanceSpan]) -> None:
    for span in spans:
        added = field.add()
        part = added.sampled_tokens if span.sampled else added.prompt_tokens
        part.sequence_id, part.offset, part.length = span.sequence_id, span.offset, span.length


def _tensor(values: np.ndarray, dtype: Any) -> pb.Tensor:
    return pb.Tensor(dense=values.tobytes(), dtype=dtype, shape=values.shape)


def request(model: ModelId, seq_id: int, loss_fn: str, *data: Example, loss_id: str | None = None) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn=loss_fn)
    message.data.extend(example.message(loss_fn) for example in data)
    if loss_id is not None:
        message.loss_fn_config_v2["loss_id"].text = loss_id
    return pass_requests.canonical(pass_requests.RawForwardBackward.of(message))


async def row_of(
    store: Store, model: ModelId, seq_id: int, body: bytes, kind: RequestKind = RequestKind.FORWARD_BACKWARD
) -> QueuedRow:
    """As the engine finds it."""
    accepted = await journal.submit(store, model, seq_id, kind, body)
    with reading(store) as conn:
        return next(row for row in queue.queued_after(conn, 0) if row.request_id == accepted.request_id)


async def upload(store: Store, session: SessionId, loss: CustomLoss) -> str:
    """Returns its loss_id."""
    new = NewLoss(session, 0, loss, b"")
    await store.write(lambda conn: training_submission.submit_custom_loss(conn, new, None, b"{}"))
    return new.loss_id
