"""forward_backward requests: bytes or JSON → raw → canonical bytes → value.

The stored body is a ForwardBackwardRequest, serialized deterministically; the engine reads it back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from skyrl_tinker.domain.ids import ModelId
from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.domain.values import ForwardBackward
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.protobuf.datums import CUSTOM, read_datum
from skyrl_tinker.protocol.protobuf.json_passes import fill_from_json
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.protobuf.size_guard import check_parts, head
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.training import TrainingEnvelope


@dataclass(frozen=True, slots=True)
class RawForwardBackward:
    """A request that names its model and seq_id; nothing else is checked. The message is not to be changed.

    `problem`: why there is no whole message; validation raises it.
    """

    message: pb.ForwardBackwardRequest
    problem: UserError | None = None

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
    """Raises UserError when no future could be made: without model_id or seq_id."""
    try:
        message = _parsed(body)
    except UserError as problem:
        if (begun := decode_head(body, problem)) is None:
            raise
        return begun
    parse(TrainingEnvelope, {"model_id": message.model_id, "seq_id": message.seq_id})
    _fold_config(message)
    return RawForwardBackward(message)


def _parsed(body: bytes) -> pb.ForwardBackwardRequest:
    check_parts(body, pb.ForwardBackwardRequest.DESCRIPTOR)
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise UserError(f"the body is not a ForwardBackwardRequest protobuf: {error}") from error


def decode_head(body: bytes, problem: UserError) -> RawForwardBackward | None:
    """The request that a protobuf begins, of which the rest cannot be had: its seq_id is taken all the same.

    None when no future could be made.
    """
    found = head(body)
    try:
        envelope = parse(TrainingEnvelope, {"model_id": found[0], "seq_id": found[1]} if found else {})
    except UserError:
        return None
    message = pb.ForwardBackwardRequest(model_id=envelope.model_id, seq_id=envelope.seq_id)
    return RawForwardBackward(message, problem.with_traceback(None))  # which would hold the body


def decode_forward_backward_json(payload: Mapping[str, Any]) -> RawForwardBackward:
    """The JSON of SDKs up to 0.24: `forward_backward_input`, or `forward_input` for /forward.

    Raises UserError when no future could be made: without model_id or seq_id.
    """
    envelope = parse(TrainingEnvelope, payload)
    message = pb.ForwardBackwardRequest(
        model_id=envelope.model_id, seq_id=envelope.seq_id, forward_only="forward_input" in payload
    )
    try:
        fill_from_json(message, payload)
    except UserError as problem:
        return RawForwardBackward(message, problem)
    return RawForwardBackward(message)


def canonical(raw: RawForwardBackward) -> bytes:
    """Equal requests give equal bytes. Those of a request with a problem only tell it from others."""
    serialized = raw.message.SerializeToString(deterministic=True)
    return serialized if raw.problem is None else serialized + str(raw.problem).encode()


def from_canonical(body: bytes) -> ForwardBackward:
    """Read back the canonical bytes of a request that passed validation."""
    return read_value(pb.ForwardBackwardRequest.FromString(body))


def read_value(message: pb.ForwardBackwardRequest) -> ForwardBackward:
    """Turn the message of a known loss with a checked config into arrays.

    Raises UserError that names datum and field; shapes and ranges are not compared here.
    """
    spec, config = LOSSES[message.loss_fn], message.loss_fn_config_v2
    custom = spec.name == CUSTOM
    return ForwardBackward(
        model_id=ModelId(message.model_id),
        seq_id=message.seq_id,
        data=tuple(read_datum(datum, spec, f"datum {i}") for i, datum in enumerate(message.data)),
        loss_fn=message.loss_fn,
        loss_config={} if custom else {key: value.number for key, value in sorted(config.items())},
        forward_only=message.forward_only,
        loss_id=config["loss_id"].text if custom else None,
    )


def raw_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """loss_fn_config as sent."""
    return {
        key: value.text if value.WhichOneof("value") == "text" else value.number
        for key, value in sorted(message.loss_fn_config_v2.items())
    }


def _fold_config(message: pb.ForwardBackwardRequest) -> None:
    """SDKs write numbers to both maps, older ones only to the legacy map: v2 counts when it is there."""
    if not message.loss_fn_config_v2:
        for key, number in message.loss_fn_config.items():
            message.loss_fn_config_v2[key].number = number
    message.loss_fn_config.clear()
    message.DiscardUnknownFields()
