"""Requests of a pass in the workers' format: read from their bodies, with referenced records and losses.

An error in one request is the Failure of that request only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import ModelKey, RequestKind, SessionId
from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.domain.values import CustomLoss, Datum, Failure, ForwardBackward, PassItem
from skyrl_tinker.engine.outbox import failure_of
from skyrl_tinker.engine.scheduling.row_work import model_of
from skyrl_tinker.engine.trainer.provenance import Records, shown, with_experts, with_records
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.custom_loss import as_declared
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.store import custom_losses
from skyrl_tinker.store.futures.queue import QueuedRow

T = TypeVar("T")


def attempt(work: Callable[[], T]) -> T | Failure:
    try:
        return work()
    except Exception as error:  # becomes the result of this request
        return failure_of(error)


@dataclass(frozen=True, slots=True)
class ReadRow:
    """Row of a pass with its body read."""

    row: QueuedRow
    model: ModelKey
    request: ForwardBackward

    @classmethod
    def read(cls, row: QueuedRow, bodies: Mapping[int, bytes], *, router_replay: bool) -> "ReadRow":
        """Read the body of a row. `bodies`: by row id. Raises the errors of reading it."""
        if row.id not in bodies:
            raise UserError("the request expired before it started")
        return cls(
            row, model_of(row), pass_requests.from_canonical(bodies[row.id], input_spans=router_replay)
        )

    @property
    def sequences(self) -> set[str]:
        """Ids of the sequences whose records the request needs."""
        return {
            span.sequence_id for datum in self.request.data for span in (*datum.spans, *datum.input_spans)
        }

    @property
    def has_references(self) -> bool:
        """True if the request refers to stored objects."""
        return self.request.loss_id is not None or bool(self.sequences)


@dataclass(frozen=True, slots=True)
class References:
    """Stored objects that the requests of a pass refer to."""

    records: Records = field(default_factory=Records)
    custom: Mapping[tuple[SessionId, str], CustomLoss] = field(default_factory=dict)

    @classmethod
    def look_up(cls, conn: Connection, rows: Sequence[ReadRow]) -> "References":
        """Look up all that these rows refer to."""
        records = Records.look_up(conn, set().union(*(row.sequences for row in rows)))
        ids = {(read.row.session_id, read.request.loss_id) for read in rows if read.request.loss_id}
        losses = {key: custom_losses.get(conn, *key) for key in ids}
        return cls(records, {key: loss for key, loss in losses.items() if loss is not None})

    def item(self, read: ReadRow) -> PassItem:
        """Return the item for the workers. Raises UserError, naming an unknown reference."""
        request, row = read.request, read.row
        assert row.seq_id is not None, "training requests are numbered"
        data = self._data(read)
        custom = None if request.loss_id is None else self._custom(row.session_id, request.loss_id)
        return PassItem(
            request_id=row.request_id,
            model=read.model,
            data=data if custom is None else as_declared(custom, data),
            loss_fn=request.loss_fn,
            loss_config=request.loss_config,
            backward=row.kind is RequestKind.FORWARD_BACKWARD,
            seq_id=row.seq_id,
            custom=custom,
        )

    def _data(self, read: ReadRow) -> tuple[Datum, ...]:
        recorded = LOSSES[read.request.loss_fn].recorded
        data = []
        for index, datum in enumerate(read.request.data):
            found = f"datum {index}", read.row.session_id, self.records
            data.append(with_experts(with_records(datum, *found) if recorded else datum, *found))
        return tuple(data)

    def _custom(self, session_id: SessionId, loss_id: str) -> CustomLoss:
        loss = self.custom.get((session_id, loss_id))
        if loss is None:
            raise UserError(
                f"loss_fn_config['loss_id'] is {shown(loss_id)}, which is unknown, or of another session: "
                "expected one of a loss that was created in the session of this model"
            )
        return loss
