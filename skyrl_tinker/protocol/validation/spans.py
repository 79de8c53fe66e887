"""Provenance spans, for the losses that look up the record of a sample, and for router replay."""

from collections.abc import Sequence

from skyrl_tinker.domain.values import Datum, ProvenanceSpan
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.base import shorten


def check_spans(datum: Datum, loss_fn: str, where: str) -> None:
    """Raise UserError unless the spans tile the target tokens. Their sequences may not exist."""
    if not datum.spans:
        raise UserError(
            f"{where}: loss_fn {loss_fn} needs provenance spans: "
            "sample with record_stability_info and build the datum with Datum.with_provenance"
        )
    check_tiling(datum.spans, f"{where}: loss_fn_input_spans", len(datum.target_tokens), "target_tokens")


def check_tiling(spans: Sequence[ProvenanceSpan], field: str, expected: int, tiled: str) -> None:
    """Raise UserError unless the spans, `field`, tile as many positions as expected, those of `tiled`."""
    for index, span in enumerate(spans):
        _check_span(span, f"{field}[{index}]")
    covered = sum(span.length for span in spans)
    if covered != expected:
        raise UserError(f"{field} cover {covered} positions, expected {expected} (the length of {tiled})")


def _check_span(span: ProvenanceSpan, field: str) -> None:
    if not span.sequence_id or "\0" in span.sequence_id:
        found = shorten(span.sequence_id) if span.sequence_id else "empty"
        raise UserError(f"{field}.sequence_id is {found}, expected the sequence_id of a sampled sequence")
    for name, value in (("offset", span.offset), ("length", span.length)):
        if value < 0:
            raise UserError(f"{field}.{name} is {value}, expected at least 0")
