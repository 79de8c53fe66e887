"""Protobuf bodies that are nearly right: odd values, bits flipped, ends cut off, pieces of another."""

import random
from collections import Counter
from collections.abc import Iterator

import httpx
import numpy as np
import zstandard

from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from tests.protocol.support.messages import csr, request

NUMBERS = range(1, 5000)
ODD = (0, 1, -1, 2, 3, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))
ODD_FLOATS = (0.0, -1.0, 1e-45, 1e308, float("inf"), float("-inf"), float("nan"))


def valid(model_id: str, source: random.Random) -> bytes:
    message = request(source.choice(sorted(LOSSES)), datums=source.randint(1, 3))
    message.model_id, message.seq_id = model_id, source.choice(NUMBERS)
    message.forward_only = source.random() < 0.2
    if message.loss_fn == "cross_entropy" and source.random() < 0.5:
        message.data[0].loss_fn_inputs["weights"].CopyFrom(csr([1.0, 2.0], [0, 1, 1, 2], [0, 1], (3, 2)))
        targets = pb.Tensor(dense=np.ones(6, "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[3, 2])
        message.data[0].loss_fn_inputs["target_tokens"].CopyFrom(targets)
    return message.SerializeToString()


def changed(body: bytes, source: random.Random) -> bytes:
    """Still a message, but with odd values in some of its fields."""
    message = pb.ForwardBackwardRequest.FromString(body)
    for _ in range(source.randint(1, 3)):
        _change(message, source.choice(message.data), source)
    return message.SerializeToString()


def _change(message: pb.ForwardBackwardRequest, datum: pb.Datum, source: random.Random) -> None:
    tensor = datum.loss_fn_inputs[source.choice(sorted(datum.loss_fn_inputs) or ["target_tokens"])]
    kind = source.randrange(9)
    if kind == 0:
        datum.model_input.add().encoded_text.tokens = source.randbytes(source.randrange(20))
    elif kind == 1:
        tensor.dense = source.randbytes(source.choice((0, 3, 4, 12, 24, 400)))
    elif kind == 2:
        tensor.shape.append(source.choice(ODD))
    elif kind == 3:
        tensor.dtype = source.choice((0, 1, 2, 3, 4, 77))
    elif kind == 4:
        tensor.shape[:] = [source.choice(ODD), source.choice(ODD)]
        tensor.sparse_csr.crow_indices = np.array(source.choices(ODD, k=4), "<i8").tobytes()
        tensor.sparse_csr.col_indices = np.array(source.choices(ODD, k=2), "<i8").tobytes()
        tensor.sparse_csr.values = source.randbytes(8)
    elif kind == 5:
        message.loss_fn = source.choice([*sorted(LOSSES), "", "\0", "nothing"])
    elif kind == 6:
        name = source.choice(("clip_low_threshold", "clip_high_threshold", "beta", "kl_coeff", ""))
        message.loss_fn_config_v2[name].number = source.choice(ODD_FLOATS)
    elif kind == 7:
        message.loss_fn_config_v2["loss_id"].text = source.choice(("", "x", "\0", "ü" * 100))
    else:
        span = datum.loss_fn_input_spans.add().sampled_tokens
        span.sequence_id, span.offset, span.length = "a", source.choice(ODD), source.choice(ODD)


def damaged(body: bytes, other: bytes, source: random.Random) -> bytes:
    wrong = bytearray(body)
    kind = source.randrange(4)
    at = source.randrange(len(wrong))
    if kind == 0:
        for _ in range(source.randint(1, 8)):
            wrong[source.randrange(len(wrong))] ^= 1 << source.randrange(8)
    elif kind == 1:
        del wrong[at:]
    elif kind == 2:
        start = source.randrange(len(other))
        wrong[at : at + source.randrange(64)] = other[start : start + source.randrange(64)]
    else:
        wrong[at:at] = source.randbytes(source.randint(1, 16))
    return bytes(wrong)


def bodies(model_id: str, seed: int) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Without end. Half are messages still. One in four is compressed, half of these damaged once more."""
    source = random.Random(seed)
    while True:
        body = valid(model_id, source)
        if source.random() < 0.5:
            body = changed(body, source)
        else:
            body = damaged(body, valid(model_id, source), source)
        headers = {"Content-Type": "application/x-protobuf"}
        if source.random() < 0.25:
            headers["Content-Encoding"] = "zstd"
            body = zstandard.ZstdCompressor().compress(body)
            if source.random() < 0.5:
                body = damaged(body, body, source)
        yield body, headers


def send(http: httpx.Client, model_id: str, seed: int, count: int) -> Counter[int]:
    """Count the statuses. AssertionError with the body that got a wrong answer."""
    statuses: Counter[int] = Counter()
    for _, (body, headers) in zip(range(count), bodies(model_id, seed), strict=False):
        answer = http.post("forward_backward", content=body, headers=headers)
        statuses[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404, 413, 422), f"{answer.text} for {headers} {body.hex()}"
        assert int(answer.headers["content-length"]) > 0
        assert isinstance(answer.json()["request_id" if answer.status_code == 200 else "detail"], str)
    return statuses
