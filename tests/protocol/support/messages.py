"""forward_backward messages of three tokens per datum, and changes to their datum 1."""

from collections.abc import Callable
from typing import Any

import numpy as np

from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.domain.values import ForwardBackward
from skyrl_tinker.protocol.protobuf.pass_requests import RawForwardBackward
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.validation.limits import Limits
from skyrl_tinker.protocol.validation.training import validate_forward_backward

LIMITS = Limits("tiny", vocab_size=10, context_length=4, max_datums=3, max_lora_rank=8, max_targets=16)
DTYPES = {np.float32: pb.DTYPE_FLOAT32, np.int64: pb.DTYPE_INT64, np.int32: pb.DTYPE_INT32}
TARGETS, WEIGHTS = r"datum 1: loss_fn_inputs\['target_tokens'\]", r"datum 1: loss_fn_inputs\['weights'\]"
SPANS = r"datum 1: loss_fn_input_spans"

Change = Callable[[pb.ForwardBackwardRequest], object]


def tensor(values: object, dtype: type = np.float32, shape: tuple[int, ...] = ()) -> pb.Tensor:
    return pb.Tensor(dense=np.asarray(values, dtype).tobytes(), dtype=DTYPES[dtype], shape=shape)


def csr(
    values: object, crow: object, col: object, shape: tuple[int, ...], dtype: type = np.float32
) -> pb.Tensor:
    sparse = pb.SparseCsr(
        values=np.asarray(values, dtype).tobytes(),
        crow_indices=np.asarray(crow, np.int64).tobytes(),
        col_indices=np.asarray(col, np.int64).tobytes(),
    )
    return pb.Tensor(sparse_csr=sparse, dtype=DTYPES[dtype], shape=shape)


def request(loss_fn: str = "cross_entropy", datums: int = 2) -> pb.ForwardBackwardRequest:
    """Return a request with all inputs of the loss, in float32 tensors without a shape."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=loss_fn)
    for _ in range(datums):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([1, 2, 3], np.int32).tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor([2, 3, 4], np.int64, (3,)))
        spec = LOSSES.get(loss_fn)
        for name in (*spec.inputs, *spec.optional) if spec else ():
            datum.loss_fn_inputs[name].CopyFrom(tensor([0.0, -1.5, 2.0]))
        if loss_fn == "stable_reinforce":
            add_spans(datum, (("a", 7, 1, False), ("a", 0, 2, True)))
    if loss_fn == "custom":
        message.loss_fn_config_v2["loss_id"].text = "x"
    return message


def add_spans(datum: pb.Datum, spans: tuple[tuple[str, int, int, bool], ...]) -> None:
    """Add spans, each given as (sequence_id, offset, length, sampled)."""
    for sequence_id, offset, length, sampled in spans:
        span = datum.loss_fn_input_spans.add()
        part = span.sampled_tokens if sampled else span.prompt_tokens
        part.sequence_id, part.offset, part.length = sequence_id, offset, length
        part.SetInParent()


def validate(message: pb.ForwardBackwardRequest, limits: Limits = LIMITS) -> ForwardBackward:
    return validate_forward_backward(RawForwardBackward.of(message), limits)


def tokens(*ids: int) -> Change:
    def change(message: pb.ForwardBackwardRequest) -> None:
        message.data[1].model_input[0].encoded_text.tokens = np.array(ids, np.int32).tobytes()

    return change


def put(name: str, value: pb.Tensor) -> Change:
    return lambda message: message.data[1].loss_fn_inputs[name].CopyFrom(value)


def spans(*given: tuple[str, int, int, bool]) -> Change:
    def change(message: pb.ForwardBackwardRequest) -> None:
        message.data[1].ClearField("loss_fn_input_spans")
        add_spans(message.data[1], given)

    return change


def config(**values: float | str) -> Change:
    def change(message: pb.ForwardBackwardRequest) -> None:
        for key, value in values.items():
            setattr(message.loss_fn_config_v2[key], "text" if isinstance(value, str) else "number", value)

    return change


def read_by_the_sdk(said: Any) -> Any:
    """Leave out of a checkpoint `base_model`, which SDKs read from 0.39 on, and `owner`, which none does."""
    if isinstance(said, list):
        return [read_by_the_sdk(each) for each in said]
    if not isinstance(said, dict):
        return said
    unread = {"base_model", "owner"} if "checkpoint_id" in said else set()
    return {key: read_by_the_sdk(value) for key, value in said.items() if key not in unread}
