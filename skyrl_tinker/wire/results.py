"""Results of passes and samples: protobuf as stored; JSON is made from it for SDKs that ask for JSON."""

from itertools import pairwise
from typing import Any, Literal

import numpy as np

from skyrl_tinker.wire.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.wire.values import Float32, PassOutput, SampledSequence, SampleOutput

PROTOBUF = "application/x-protobuf"

_OUTPUT_TYPE = "ArrayRecord"
_STOP_REASONS: dict[Literal["stop", "length"], pb.StopReason] = {
    "stop": pb.STOP_REASON_STOP,
    "length": pb.STOP_REASON_LENGTH,
}
_STOP_NAMES = {number: name for name, number in _STOP_REASONS.items()}
_FLOAT32 = np.finfo(np.float32)


def encode_forward_backward_output(output: PassOutput) -> bytes:
    """One ArrayRecord holds the logprobs of all datums.

    Raises ValueError for a metric name that would crash the client.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE)
    for name, value in output.metrics.items():
        if name.count(":") != 1:
            raise ValueError(f"metric {name!r} must be <name>:<reduction>")
        message.metrics[name] = value
    record = message.loss_fn_outputs.add(type_tag=_OUTPUT_TYPE, num_datums=len(output.logprobs))
    record.fields["logprobs"].CopyFrom(_batched(output.logprobs))
    return message.SerializeToString(deterministic=True)


def _batched(arrays: tuple[Float32, ...]) -> pb.BatchedTensor:
    offsets = np.cumsum([0, *(4 * array.size for array in arrays)], dtype="<i8")
    data = b"".join(array.astype("<f4", copy=False).tobytes() for array in arrays)
    return pb.BatchedTensor(data=data, offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32)


def forward_backward_output_json(body: bytes) -> dict[str, Any]:
    """JSON has no NaN: only finite metrics stay, and infinite logprobs become the float32 limit."""
    message = pb.ForwardBackwardOutput.FromString(body)
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": [
            {"logprobs": {"data": values, "dtype": "float32", "shape": [len(values)]}}
            for record in message.loss_fn_outputs
            for values in _unbatched(record.fields["logprobs"])
        ],
        "metrics": {name: value for name, value in sorted(message.metrics.items()) if np.isfinite(value)},
    }


def _unbatched(tensor: pb.BatchedTensor) -> list[list[float]]:
    values = np.frombuffer(tensor.data, "<f4").clip(_FLOAT32.min, _FLOAT32.max).tolist()
    offsets = (np.frombuffer(tensor.offsets, "<i8") // 4).tolist()
    return [values[start:end] for start, end in pairwise(offsets)]


def encode_sample_response(output: SampleOutput) -> bytes:
    message = pb.SampleResponse(prompt_cache_hit_tokens=output.cached_tokens)
    message.sequences.extend(_sequence(sequence) for sequence in output.sequences)
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = _floats(output.prompt_logprobs)
    return message.SerializeToString(deterministic=True)


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    return pb.SampledSequence(
        stop_reason=_STOP_REASONS[sequence.stop_reason],
        tokens=np.asarray(sequence.tokens, "<i4").tobytes(),
        logprobs=_floats(sequence.logprobs),
    )


def _floats(values: tuple[float, ...]) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def sample_response_json(body: bytes) -> dict[str, Any]:
    """prompt_logprobs: null where not computed; absent when not asked for."""
    message = pb.SampleResponse.FromString(body)
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [_sequence_json(sequence) for sequence in message.sequences],
        "prompt_cache_hit_tokens": message.prompt_cache_hit_tokens,
    }
    if message.HasField("prompt_logprobs"):
        values = np.frombuffer(message.prompt_logprobs, "<f4").clip(_FLOAT32.min, _FLOAT32.max).tolist()
        answer["prompt_logprobs"] = [None if value != value else value for value in values]
    return answer


def _sequence_json(sequence: pb.SampledSequence) -> dict[str, Any]:
    logprobs = np.frombuffer(sequence.logprobs, "<f4").clip(_FLOAT32.min, _FLOAT32.max)
    return {
        "stop_reason": _STOP_NAMES[sequence.stop_reason],
        "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
        "logprobs": logprobs.tolist(),
    }
