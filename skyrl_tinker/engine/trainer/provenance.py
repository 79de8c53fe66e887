"""Provenance of target tokens: a datum's spans, checked against the records of their sampling."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import FutureStatus, SessionId
from skyrl_tinker.domain.values import Datum, ProvenanceSpan
from skyrl_tinker.errors import UserError
from skyrl_tinker.store import stability_records
from skyrl_tinker.store.stability_records import Key, SequenceRecord

SHOWN = 100
"""Most characters of a client's text in a message."""
_WITHOUT_RECORD: Mapping[FutureStatus | None, str] = {
    None: "which is unknown, expected one that was sampled in the session of this model",
    FutureStatus.PENDING: "which is not sampled yet, expected one whose sample is done",
    FutureStatus.FAILED: "whose sample failed, expected one that was sampled",
    FutureStatus.DONE: "which has no record, expected one that was sampled with record_stability_info and "
    "whose record has not expired (setting stability_ttl_s)",
}


@dataclass(frozen=True, slots=True)
class Records:
    """Records of the sequences that were looked up; `fates`: status of the requests of those without one."""

    by_key: Mapping[Key, SequenceRecord] = field(default_factory=dict)
    fates: Mapping[Key, FutureStatus] = field(default_factory=dict)

    @classmethod
    def look_up(cls, conn: Connection, ids: Collection[str]) -> "Records":
        by_key = stability_records.find(conn, ids)
        missing = set(ids) - {sequence_id for _, sequence_id in by_key}
        return cls(by_key, stability_records.request_statuses(conn, missing))

    def get(self, session: SessionId, span: ProvenanceSpan, where: str) -> SequenceRecord:
        """Return a span's record; one of another session counts as unknown. `where` names the span."""
        record = self.by_key.get((session, span.sequence_id))
        if record is None:
            why = _WITHOUT_RECORD[self.fates.get((session, span.sequence_id))]
            raise UserError(f"{where} names sequence {shown(span.sequence_id)}, {why}")
        return record


def with_records(datum: Datum, where: str, session: SessionId, records: Records) -> Datum:
    """Add `sampling_logprobs` and `sampled` (1.0, of the prompt 0.0) for every target, both float32 [N].

    Raises UserError that names datum (`where`), span and sequence.
    """
    logprobs = np.zeros(len(datum.target_tokens), np.float32)
    sampled = np.zeros(len(datum.target_tokens), np.float32)
    start = 0
    for index, span in enumerate(datum.spans):
        field_name = f"{where}: loss_fn_input_spans[{index}]"
        record = records.get(session, span, field_name)
        _check_bounds(span, record, field_name)
        if span.sampled:
            _check_tokens(datum, start, span, record, field_name)
            logprobs[start : start + span.length] = _covered(record.logprobs, span)
            sampled[start : start + span.length] = 1.0
        else:
            _check_untrained(datum, start, span, field_name)
        start += span.length
    return replace(datum, inputs={**datum.inputs, "sampling_logprobs": logprobs, "sampled": sampled})


def _check_bounds(span: ProvenanceSpan, record: SequenceRecord, where: str) -> None:
    length = len(record.tokens) if span.sampled else record.prompt_length
    end = span.offset + span.length
    if end > length:
        part = "what was sampled as" if span.sampled else "the prompt of"
        raise UserError(
            f"{where} covers tokens [{span.offset}, {end}) of {part} sequence {shown(span.sequence_id)}, "
            f"expected at most its {length} tokens"
        )


def _check_tokens(datum: Datum, start: int, span: ProvenanceSpan, record: SequenceRecord, where: str) -> None:
    targets = datum.target_tokens[start : start + span.length]
    tokens = _covered(record.tokens, span)
    if (differing := np.flatnonzero(targets != tokens)).size:
        first = int(differing[0])
        raise UserError(
            f"{where}: target_tokens[{start + first}] is {targets[first]}, expected {tokens[first]}, "
            f"which was sampled as token {span.offset + first} of sequence {shown(span.sequence_id)}"
        )


def _check_untrained(datum: Datum, start: int, span: ProvenanceSpan, where: str) -> None:
    """Require zero advantages: only sampled tokens are trained on, others would be silently ignored."""
    advantages = datum.inputs["advantages"][start : start + span.length]
    if (nonzero := np.flatnonzero(advantages)).size:
        first = int(nonzero[0])
        raise UserError(
            f"{where} is of a prompt: advantages[{start + first}] is {advantages[first]}, expected 0"
        )


def _covered(values: np.ndarray, span: ProvenanceSpan) -> np.ndarray:
    return values[span.offset : span.offset + span.length]


def shown(name: str) -> str:
    return repr(name if len(name) <= SHOWN else name[:SHOWN] + "…")
