"""Training examples from their protobuf messages. Shapes and ranges are checked in validation.training."""

from collections.abc import Iterable

import numpy as np

from skyrl_tinker.domain.loss_specs import CUSTOM, LossSpec
from skyrl_tinker.domain.values import Datum, Int32, Number, ProvenanceSpan
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.protobuf.tensors import Array, as_array, as_float32, as_int64, read_tensor
from skyrl_tinker.protocol.schemas.base import shorten
from skyrl_tinker.protocol.schemas.sampling import require_text

TARGETS = "target_tokens"


def input_field(where: str, name: str) -> str:
    return f"{where}: loss_fn_inputs[{name!r}]"


def inputs_read(datum: pb.Datum, spec: LossSpec) -> tuple[str, ...]:
    """Return the names of the loss_fn_inputs that the loss reads, also missing ones; target_tokens first."""
    if spec.name == CUSTOM:
        return (TARGETS, *sorted(set(datum.loss_fn_inputs) - {TARGETS}))
    return (TARGETS, *spec.inputs, *(name for name in spec.optional if name in datum.loss_fn_inputs))


def read_datum(datum: pb.Datum, spec: LossSpec, where: str, *, input_spans: bool = False) -> Datum:
    """Read the inputs of the loss, cast by name; others stay unread, and so do spans that it does not need.

    `input_spans`: read those of model_input.
    Raises UserError whose message begins with `where`.
    """
    fields = datum.loss_fn_inputs
    names = inputs_read(datum, spec)
    missing = [name for name in names if name not in fields]
    if missing:
        found = shorten(sorted(fields)) if fields else "none"
        raise UserError(f"{where}: loss_fn_inputs lacks {missing[0]!r}, found {found}")
    read = _custom_input if spec.name == CUSTOM else _float32_input
    field = input_field(where, TARGETS)
    return Datum(
        tokens=text_tokens(datum, where),
        target_tokens=as_int64(read_tensor(fields[TARGETS], field), field),
        inputs={name: read(fields[name], input_field(where, name)) for name in names[1:]},
        spans=_spans(datum.loss_fn_input_spans if spec.recorded else (), f"{where}: loss_fn_input_spans"),
        input_spans=_spans(datum.model_input_spans if input_spans else (), f"{where}: model_input_spans"),
    )


def text_tokens(datum: pb.Datum, where: str) -> Int32:
    """Join all encoded_text chunks: [N]. Raises NotSupportedError for other chunks."""
    for position, chunk in enumerate(datum.model_input):
        require_text(chunk.WhichOneof("chunk") or "empty", f"{where}: model_input chunk {position}")
    joined = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    return as_array(joined, np.dtype("<i4"), f"{where}: model_input")


def _float32_input(tensor: pb.Tensor, field: str) -> Number:
    return as_float32(read_tensor(tensor, field))


def _custom_input(tensor: pb.Tensor, field: str) -> Number:
    """Read an input in its own dtype. One value without a shape counts as a scalar."""
    values: Array = read_tensor(tensor, field)
    if values.dtype == np.int32:
        values = values.astype(np.int64)
    return values.reshape(()) if not tensor.shape and values.size == 1 else values


def _spans(spans: Iterable[pb.ProvenanceSpan], field: str) -> tuple[ProvenanceSpan, ...]:
    return tuple(_span(span, f"{field}[{index}]") for index, span in enumerate(spans))


def _span(span: pb.ProvenanceSpan, field: str) -> ProvenanceSpan:
    kind = span.WhichOneof("span")
    if kind is None:
        raise UserError(f"{field} is empty, expected prompt_tokens or sampled_tokens")
    part = span.sampled_tokens if kind == "sampled_tokens" else span.prompt_tokens
    return ProvenanceSpan(part.sequence_id, part.offset, part.length, kind == "sampled_tokens")
