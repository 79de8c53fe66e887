"""Results of samples: stored as protobuf, converted to JSON for SDKs that ask for it."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from skyrl_tinker.domain.samples import AltTokens, SampledSequence, SampleOutput, TargetLogprobs, TopkRow
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.protobuf.tensors import finite_floats

_STOP_REASONS: dict[Literal["stop", "length"], pb.StopReason] = {
    "stop": pb.STOP_REASON_STOP,
    "length": pb.STOP_REASON_LENGTH,
}
_STOP_NAMES = {number: name for name, number in _STOP_REASONS.items()}
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0
"""An empty cell of TopkLogprobs."""


def encode_sample_response(output: SampleOutput) -> bytes:
    message = pb.SampleResponse(prompt_cache_hit_tokens=output.cached_tokens)
    message.sequences.extend(_sequence(sequence) for sequence in output.sequences)
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = _floats(output.prompt_logprobs)
    if output.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(output.topk_prompt_logprobs))
    if output.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_targets(output.target_prompt_logprobs))
    if output.prompt_alt_tokens is not None:
        message.prompt_alt_tokens.CopyFrom(_alt_tokens(output.prompt_alt_tokens))
    return message.SerializeToString(deterministic=True)


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    message = pb.SampledSequence(
        stop_reason=_STOP_REASONS[sequence.stop_reason],
        tokens=np.asarray(sequence.tokens, "<i4").tobytes(),
        logprobs=_floats(sequence.logprobs),
    )
    if sequence.topk:
        message.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk))
    for span in sequence.versions:
        message.weight_versions.add(version=span.version, start=span.start, end=span.end)
    return message


def _floats(values: Sequence[float] | Sequence[Sequence[float]]) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def _topk(rows: Sequence[TopkRow]) -> pb.TopkLogprobs:
    """Encode rows, row-major, as wide as the longest but at least one cell, so that no row is lost."""
    k = max(1, *(len(row) for row in rows))
    tokens = np.full((len(rows), k), _NO_TOKEN, "<i4")
    logprobs = np.full((len(rows), k), _NO_LOGPROB, "<f4")
    for index, row in enumerate(rows):
        if row:
            tokens[index, : len(row)], logprobs[index, : len(row)] = zip(*row, strict=True)
    return pb.TopkLogprobs(token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(rows))


def _targets(scored: TargetLogprobs) -> pb.Tensor:
    """Encode scores in the layout of the request: dense, or CSR with the same indices."""
    targets, values = scored.targets, _floats(scored.logprobs)
    message = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=targets.shape)
    if targets.crow is None:
        message.dense = values
        return message
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = np.asarray(targets.crow, "<i8").tobytes()
    message.sparse_csr.col_indices = np.asarray(targets.col or (), "<i8").tobytes()
    return message


def _alt_tokens(draws: AltTokens) -> pb.PromptAltTokens:
    shape = (len(draws.tokens), draws.k)
    tokens = np.asarray(draws.tokens, "<i8").tobytes()
    return pb.PromptAltTokens(
        tokens=pb.Tensor(dtype=pb.DTYPE_INT64, shape=shape, dense=tokens),
        logprobs=pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape, dense=_floats(draws.logprobs)),
    )


def sample_response_json(body: bytes) -> dict[str, Any]:
    """Convert to JSON, which has no NaN: null where not computed. Fields not requested are absent."""
    message = pb.SampleResponse.FromString(body)
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [_sequence_json(sequence) for sequence in message.sequences],
        "prompt_cache_hit_tokens": message.prompt_cache_hit_tokens,
    }
    if message.HasField("prompt_logprobs"):
        values = finite_floats(message.prompt_logprobs).tolist()
        answer["prompt_logprobs"] = [None if value != value else value for value in values]
    if message.HasField("topk_prompt_logprobs"):
        answer["topk_prompt_logprobs"] = _topk_json(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        answer["target_prompt_logprobs"] = _tensor_json(message.target_prompt_logprobs)
    if message.HasField("prompt_alt_tokens"):
        draws = message.prompt_alt_tokens
        answer["prompt_alt_tokens"] = {
            "tokens": _tensor_json(draws.tokens),
            "logprobs": _tensor_json(draws.logprobs),
        }
    return answer


def sequences_at(body: bytes, first: int, most: int) -> tuple[list[dict[str, Any]], int]:
    """Return the sequences from number `first` on, as JSON, and how many there are in all."""
    found = pb.SampleResponse.FromString(body).sequences
    return [_sequence_json(sequence) for sequence in found[first : first + most]], len(found)


def _sequence_json(sequence: pb.SampledSequence) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "stop_reason": _STOP_NAMES[sequence.stop_reason],
        "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
        "logprobs": finite_floats(sequence.logprobs).tolist(),
    }
    if sequence.HasField("topk_sampled_logprobs"):
        answer["topk_logprobs"] = _topk_json(sequence.topk_sampled_logprobs)
    if sequence.weight_versions:
        answer["weight_versions"] = [
            {"version": span.version, "start": span.start, "end": span.end}
            for span in sequence.weight_versions
        ]
    return answer


def _topk_json(topk: pb.TopkLogprobs) -> list[list[list[Any]] | None]:
    """Return per position [[token, logprob], ...], the most likely first; null where nothing was computed."""
    tokens = np.frombuffer(topk.token_ids, "<i4").reshape(topk.length, topk.k).tolist()
    logprobs = finite_floats(topk.logprobs).reshape(topk.length, topk.k).tolist()
    return [_row_json(*row) for row in zip(tokens, logprobs, strict=True)]


def _row_json(tokens: list[int], logprobs: list[float]) -> list[list[Any]] | None:
    cells = zip(tokens, logprobs, strict=True)
    return [list(cell) for cell in cells if cell != (_NO_TOKEN, _NO_LOGPROB)] or None


def _tensor_json(tensor: pb.Tensor) -> dict[str, Any]:
    integers = tensor.dtype == pb.DTYPE_INT64
    sparse = tensor.WhichOneof("encoding") == "sparse_csr"
    data = tensor.sparse_csr.values if sparse else tensor.dense
    answer = {
        "data": (np.frombuffer(data, "<i8") if integers else finite_floats(data)).tolist(),
        "dtype": "int64" if integers else "float32",
        "shape": list(tensor.shape),
    }
    if sparse:
        answer["sparse_crow_indices"] = np.frombuffer(tensor.sparse_csr.crow_indices, "<i8").tolist()
        answer["sparse_col_indices"] = np.frombuffer(tensor.sparse_csr.col_indices, "<i8").tolist()
    return answer
