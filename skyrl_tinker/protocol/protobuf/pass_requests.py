"""forward_backward requests: bytes or JSON → raw → canonical bytes → value.

The stored body is a ForwardBackwardRequest, serialized deterministically; the engine reads it back.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from skyrl_tinker.domain.ids import ModelId
from skyrl_tinker.domain.loss_specs import CUSTOM, LOSSES
from skyrl_tinker.domain.values import Datum, ForwardBackward, Int32
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.protobuf.datums import read_datum
from skyrl_tinker.protocol.protobuf.json_passes import fill_from_json
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.protobuf.size_guard import check_parts, head
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.training import TrainingEnvelope


@dataclass(frozen=True, slots=True)
class RawForwardBackward:
    """A request that names its model and seq_id; nothing else is checked. The message must not be changed.

    `serialized`: the message, deterministically. `problem`: why that is not all; validation raises it.
    """

    message: pb.ForwardBackwardRequest
    serialized: bytes
    problem: UserError | None = None

    @classmethod
    def of(cls, message: pb.ForwardBackwardRequest, problem: UserError | None = None) -> Self:
        # A new problem: its traceback and its cause would hold the body.
        kept = problem and type(problem)(str(problem))
        return cls(message, message.SerializeToString(deterministic=True), kept)

    @property
    def model_id(self) -> ModelId:
        return ModelId(self.message.model_id)

    @property
    def seq_id(self) -> int:
        return self.message.seq_id

    @property
    def forward_only(self) -> bool:
        return self.message.forward_only


def decode_forward_backward(body: bytes) -> RawForwardBackward:
    """Decode a protobuf body. Raises UserError without model_id or seq_id, which a future needs."""
    try:
        message = _parsed(body)
    except UserError as problem:
        if (partial := decode_head(body, problem)) is None:
            raise
        return partial
    parse(TrainingEnvelope, {"model_id": message.model_id, "seq_id": message.seq_id})
    folded = _fold_config(message)
    raw = RawForwardBackward.of(message)
    # Unknown fields are dropped by now. The sizes tell whether to look for them: that takes a second parse.
    found = None if len(raw.serialized) + folded == len(body) else find_unknown_field(_parsed(body))
    return raw if found is None else replace(raw, problem=UserError(found))


def _parsed(body: bytes) -> pb.ForwardBackwardRequest:
    check_parts(body, pb.ForwardBackwardRequest.DESCRIPTOR)
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise UserError(f"the body is not a ForwardBackwardRequest protobuf: {error}") from error


def decode_head(body: bytes, problem: UserError) -> RawForwardBackward | None:
    """Decode only the beginning of an unreadable protobuf, so that its seq_id is consumed all the same.

    Returns None without model_id or seq_id, which a future needs.
    """
    fields = head(body)
    try:
        envelope = parse(TrainingEnvelope, {"model_id": fields[0], "seq_id": fields[1]} if fields else {})
    except UserError:
        return None
    message = pb.ForwardBackwardRequest(model_id=envelope.model_id, seq_id=envelope.seq_id)
    return RawForwardBackward.of(message, problem)


def decode_forward_backward_json(payload: Mapping[str, Any]) -> RawForwardBackward:
    """Decode the JSON of SDKs up to 0.24: `forward_backward_input`, or `forward_input` for /forward.

    Raises UserError without model_id or seq_id, which a future needs.
    """
    envelope = parse(TrainingEnvelope, payload)
    message = pb.ForwardBackwardRequest(
        model_id=envelope.model_id, seq_id=envelope.seq_id, forward_only="forward_input" in payload
    )
    try:
        fill_from_json(message, payload)
    except UserError as problem:
        return RawForwardBackward.of(message, problem)
    return RawForwardBackward.of(message)


def canonical(raw: RawForwardBackward) -> bytes:
    """Return the stored bytes, equal for equal requests. With a problem they only serve to compare them."""
    return raw.serialized if raw.problem is None else raw.serialized + str(raw.problem).encode()


def from_canonical(body: bytes, *, input_spans: bool = False) -> ForwardBackward:
    """Read back the canonical bytes of a request that passed validation; see `read_value`."""
    return read_value(pb.ForwardBackwardRequest.FromString(body), input_spans=input_spans)


def data_at(body: bytes, first: int, most: int) -> tuple[list[Datum], int]:
    """Return the datums of the canonical bytes from number `first` on, and how many there are in all."""
    message = pb.ForwardBackwardRequest.FromString(body)
    part, spec = enumerate(message.data[first : first + most], first), LOSSES[message.loss_fn]
    return [read_datum(datum, spec, f"datum {number}") for number, datum in part], len(message.data)


def head_of(body: bytes) -> tuple[str, int, Int32]:
    """Return the loss function of the canonical bytes, their number of datums, and the first one's tokens."""
    message = pb.ForwardBackwardRequest.FromString(body)
    first = read_datum(message.data[0], LOSSES[message.loss_fn], "datum 0")
    return message.loss_fn, len(message.data), first.tokens


def read_value(message: pb.ForwardBackwardRequest, *, input_spans: bool = False) -> ForwardBackward:
    """Convert the message of a known loss with a checked config to arrays.

    `input_spans`: read those of model_input, too. Raises UserError that names datum and field; shapes and
    ranges are not checked.
    """
    spec, config = LOSSES[message.loss_fn], message.loss_fn_config_v2
    custom = spec.name == CUSTOM
    return ForwardBackward(
        model_id=ModelId(message.model_id),
        seq_id=message.seq_id,
        data=tuple(
            read_datum(datum, spec, f"datum {i}", input_spans=input_spans)
            for i, datum in enumerate(message.data)
        ),
        loss_fn=message.loss_fn,
        loss_config={} if custom else {key: value.number for key, value in sorted(config.items())},
        forward_only=message.forward_only,
        loss_id=config["loss_id"].text if custom else None,
    )


def raw_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Return loss_fn_config as sent."""
    return {
        key: value.text if value.WhichOneof("value") == "text" else value.number
        for key, value in sorted(message.loss_fn_config_v2.items())
    }


def _fold_config(message: pb.ForwardBackwardRequest) -> int:
    """Move the legacy map, the only one of older SDKs, to v2, unless v2 is set: newer SDKs write to both.

    Drop unknown fields before. Return by how many bytes the config shrank.
    """
    message.DiscardUnknownFields()
    if not message.loss_fn_config:
        return 0
    size = _config_size(message)
    if not message.loss_fn_config_v2:
        for key, number in message.loss_fn_config.items():
            message.loss_fn_config_v2[key].number = number
    message.loss_fn_config.clear()
    return size - _config_size(message)


def _config_size(message: pb.ForwardBackwardRequest) -> int:
    legacy, config = message.loss_fn_config, message.loss_fn_config_v2
    return pb.ForwardBackwardRequest(loss_fn_config=legacy, loss_fn_config_v2=config).ByteSize()


def find_unknown_field(message: Message, where: str = "body") -> str | None:
    """Describe the first unknown field of the message or of one in it; `where` names the message."""
    if unknown := UnknownFieldSet(message):
        name, fields = message.DESCRIPTOR.name, message.DESCRIPTOR.fields
        known = ", ".join(f"{field.name} ({field.number})" for field in fields)
        return f"{where} has the unknown field number {unknown[0].field_number} of {name}, expected {known}"
    for name, inner in _messages_in(message):
        if (found := find_unknown_field(inner, f"{where}.{name}")) is not None:
            return found
    return None


def _messages_in(message: Any) -> Iterator[tuple[str, Message]]:
    """Yield name and value of each message directly in this one."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None:
            continue
        value = getattr(message, field.name)
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                yield from ((f"{field.name}[{key!r}]", value[key]) for key in sorted(value))
        elif field.is_repeated:
            yield from ((f"{field.name}[{index}]", each) for index, each in enumerate(value))
        elif message.HasField(field.name):
            yield field.name, value
