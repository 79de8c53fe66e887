"""Where target tokens come from: a datum's spans, checked against what was recorded while sampling."""

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
    """Of the sequences that were looked up; `fates`: how the requests stand that sample those without."""

    found: Mapping[Key, SequenceRecord] = field(default_factory=dict)
    fates: Mapping[Key, FutureStatus] = field(default_factory=dict)

    @classmethod
    def look_up(cls, conn: Connection, ids: Collection[str]) -> "Records":
        found = stability_records.find(conn, ids)
        missing = set(ids) - {sequence_id for _, sequence_id in found}
        return cls(found, stability_records.request_statuses(conn, missing))

    def get(self, session: SessionId, span: ProvenanceSpan, where: str) -> SequenceRecord:
        """Another session's sequence is as unknown as one that never was. `where` names the span."""
        record = self.found.get((session, span.sequence_id))
        if record is None:
            why = _WITHOUT_RECORD[self.fates.get((session, span.sequence_id))]
            raise UserError(f"{where} names sequence {shown(span.sequence_id)}, {why}")
        return record


def with_records(datum: Datum, where: str, session: SessionId, records: Records) -> Datum:
    """With `sampling_logprobs` and `sampled` (1.0, of the prompt 0.0) for every target, both float32 [N].

    Raises UserError that names datum (`where`), span and sequence.
    """
    logprobs = np.zeros(len(datum.target_tokens), np.float32)
    sampled = np.zeros(len(datum.target_tokens), np.float32)
    start = 0
    for index, span in enumerate(datum.spans):
        named = f"{where}: loss_fn_input_spans[{index}]"
        record = records.get(session, span, named)
        _check_bounds(span, record, named)
        if span.sampled:
            _check_tokens(datum, start, span, record, named)
            logprobs[start : start + span.length] = _covered(record.logprobs, span)
            sampled[start : start + span.length] = 1.0
        else:
            _check_silent(datum, start, span, named)
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


def _check_silent(datum: Datum, start: int, span: ProvenanceSpan, where: str) -> None:
    """Only what was sampled can be trained on: an advantage elsewhere would be lost without a word."""
    advantages = datum.inputs["advantages"][start : start + span.length]
    if (found := np.flatnonzero(advantages)).size:
        first = int(found[0])
        raise UserError(
            f"{where} is of a prompt: advantages[{start + first}] is {advantages[first]}, expected 0"
        )


def _covered(values: np.ndarray, span: ProvenanceSpan) -> np.ndarray:
    return values[span.offset : span.offset + span.length]


def shown(name: str) -> str:
    return repr(name if len(name) <= SHOWN else name[:SHOWN] + "…")
