"""Provenance spans, for the losses that look up the record of a sample."""

from skyrl_tinker.domain.values import Datum, ProvenanceSpan
from skyrl_tinker.errors import UserError


def check_spans(datum: Datum, loss_fn: str, where: str) -> None:
    """Raise UserError unless the spans tile the target tokens. Their sequences may not exist."""
    if not datum.spans:
        raise UserError(
            f"{where}: loss_fn {loss_fn} needs provenance spans: "
            "sample with record_stability_info and build the datum with Datum.with_provenance"
        )
    for index, span in enumerate(datum.spans):
        _check_span(span, f"{where}: loss_fn_input_spans[{index}]")
    covered, expected = sum(span.length for span in datum.spans), len(datum.target_tokens)
    if covered != expected:
        raise UserError(
            f"{where}: loss_fn_input_spans cover {covered} positions, "
            f"expected {expected} (the length of target_tokens)"
        )


def _check_span(span: ProvenanceSpan, field: str) -> None:
    if not span.sequence_id:
        raise UserError(f"{field}.sequence_id is empty, expected the sequence_id of a sampled sequence")
    for name, value in (("offset", span.offset), ("length", span.length)):
        if value < 0:
            raise UserError(f"{field}.{name} is {value}, expected at least 0")
