"""Provenance of a datum's tokens: its spans, checked against the records of their sampling."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import FutureStatus, SessionId
from skyrl_tinker.domain.values import Datum, Int32, Int64, ProvenanceSpan, ReplayedExperts, RoutedExperts
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.validation.spans import check_tiling
from skyrl_tinker.store import stability_records
from skyrl_tinker.store.stability_records import Key, RoutingRecord, SequenceRecord

SHOWN = 100
"""Most characters of a client's text in a message."""
_WITHOUT_RECORD: Mapping[FutureStatus | None, str] = {
    None: "which is unknown, expected one that was sampled in the session of this model",
    FutureStatus.PENDING: "which is not sampled yet, expected one whose sample is done",
    FutureStatus.FAILED: "whose sample failed, expected one that was sampled",
    FutureStatus.DONE: "which has no record, expected one that was sampled with record_stability_info and "
    "whose record has not expired (setting retention.results_s)",
}


@dataclass(frozen=True, slots=True)
class Records:
    """Records of the sequences that were looked up; `fates`: for missing records, status of the request."""

    by_key: Mapping[Key, SequenceRecord] = field(default_factory=dict)
    fates: Mapping[Key, FutureStatus] = field(default_factory=dict)

    @classmethod
    def look_up(cls, conn: Connection, ids: Collection[str]) -> "Records":
        by_key = stability_records.find(conn, ids)
        missing = set(ids) - {sequence_id for _, sequence_id in by_key}
        return cls(by_key, stability_records.request_statuses(conn, missing))

    @property
    def nbytes(self) -> int:
        """Bytes of the recorded experts, the largest part."""
        routings = (record.routing for record in self.by_key.values())
        return sum(routing.experts.nbytes for routing in routings if routing is not None)

    def get(self, session: SessionId, span: ProvenanceSpan, where: str) -> SequenceRecord:
        """Return a span's record; another session's record counts as unknown. `where` names the span."""
        record = self.by_key.get((session, span.sequence_id))
        if record is None:
            why = _WITHOUT_RECORD[self.fates.get((session, span.sequence_id))]
            raise UserError(f"{where} names sequence {shown(span.sequence_id)}, {why}")
        return record


def with_records(datum: Datum, where: str, session: SessionId, records: Records) -> Datum:
    """Add `sampling_logprobs` and `sampled` (1.0; prompt: 0.0) for every target, both float32 [N].

    Raises UserError, naming datum (`where`), span and sequence.
    """
    logprobs = np.zeros(len(datum.target_tokens), np.float32)
    sampled = np.zeros(len(datum.target_tokens), np.float32)
    start = 0
    for index, span in enumerate(datum.spans):
        field_name = f"{where}: loss_fn_input_spans[{index}]"
        record = records.get(session, span, field_name)
        _check_bounds(span, record, field_name)
        if span.sampled:
            targets = datum.target_tokens[start : start + span.length]
            _check_tokens(targets, f"{field_name}: target_tokens", start, span, record.tokens)
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


def with_experts(datum: Datum, where: str, session: SessionId, records: Records) -> Datum:
    """Add the recorded experts of its tokens, if there are any.

    Spans of sequences without such a record are skipped. Raises UserError, naming datum (`where`), span and
    sequence.
    """
    parts: list[tuple[int, RoutedExperts]] = []
    field_name, start = f"{where}: model_input_spans", 0
    if datum.input_spans:
        check_tiling(datum.input_spans, field_name, len(datum.tokens), "model_input")
    for index, span in enumerate(datum.input_spans):
        record = records.by_key.get((session, span.sequence_id))
        if record is not None and record.routing is not None:
            tokens = datum.tokens[start : start + span.length]
            parts.append(
                (start, _experts(tokens, f"{field_name}[{index}]", start, span, record, record.routing))
            )
        start += span.length
    return replace(datum, replayed=_replayed(len(datum.tokens), parts)) if parts else datum


def _experts(
    found: Int32, where: str, start: int, span: ProvenanceSpan, record: SequenceRecord, routing: RoutingRecord
) -> RoutedExperts:
    """Return the experts of the span's tokens: the last sampled token of a sequence has none."""
    _check_bounds(span, record, where)
    tokens = record.tokens if span.sampled else routing.prompt
    _check_tokens(found, f"{where}: model_input", start, span, tokens)
    first = span.offset + (record.prompt_length if span.sampled else 0)
    return routing.experts[first : first + span.length]


def _replayed(length: int, parts: Sequence[tuple[int, RoutedExperts]]) -> ReplayedExperts:
    first = parts[0][1]
    experts, known = np.zeros((length, *first.shape[1:]), first.dtype), np.zeros(length, bool)
    for start, part in parts:
        experts[start : start + len(part)] = part
        known[start : start + len(part)] = True
    return ReplayedExperts(experts, known)


def _check_tokens(
    found: Int32 | Int64, field_name: str, start: int, span: ProvenanceSpan, recorded: Int32
) -> None:
    """Require the tokens found, from `start` on in the field, to equal the recorded ones."""
    tokens = _covered(recorded, span)
    if (differing := np.flatnonzero(found != tokens)).size:
        first = int(differing[0])
        part = "was sampled as token" if span.sampled else "is prompt token"
        raise UserError(
            f"{field_name}[{start + first}] is {found[first]}, expected {tokens[first]}, "
            f"which {part} {span.offset + first} of sequence {shown(span.sequence_id)}"
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
