"""Protobuf bodies that are nearly right: bits flipped, ends cut off, pieces of one put into another."""

import random
from collections import Counter
from collections.abc import Iterator

import httpx
import numpy as np
import zstandard

from skyrl_tinker.wire.losses import LOSSES
from skyrl_tinker.wire.pb import skyrl_tinker_wire_pb2 as pb
from tests.wire.messages import csr, request

NUMBERS = range(1, 200)


def valid(model_id: str, source: random.Random) -> bytes:
    message = request(source.choice(sorted(LOSSES)), datums=source.randint(1, 3))
    message.model_id, message.seq_id = model_id, source.choice(NUMBERS)
    message.forward_only = source.random() < 0.2
    if message.loss_fn == "cross_entropy" and source.random() < 0.5:
        message.data[0].loss_fn_inputs["weights"].CopyFrom(csr([1.0, 2.0], [0, 1, 1, 2], [0, 1], (3, 2)))
        targets = pb.Tensor(dense=np.ones(6, "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[3, 2])
        message.data[0].loss_fn_inputs["target_tokens"].CopyFrom(targets)
    return message.SerializeToString()


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
    """Without end. One in four is compressed, half of these damaged once more."""
    source = random.Random(seed)
    while True:
        body = damaged(valid(model_id, source), valid(model_id, source), source)
        headers = {"Content-Type": "application/x-protobuf"}
        if source.random() < 0.25:
            headers["Content-Encoding"] = "zstd"
            body = zstandard.ZstdCompressor().compress(body)
            if source.random() < 0.5:
                body = damaged(body, body, source)
        yield body, headers


def send(http: httpx.Client, model_id: str, seed: int, count: int) -> Counter[int]:
    """How often each status came. AssertionError with the body that got a wrong answer."""
    statuses: Counter[int] = Counter()
    for _, (body, headers) in zip(range(count), bodies(model_id, seed), strict=False):
        answer = http.post("forward_backward", content=body, headers=headers)
        statuses[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404, 413, 422), f"{answer.text} for {headers} {body.hex()}"
        assert int(answer.headers["content-length"]) > 0
        assert isinstance(answer.json()["request_id" if answer.status_code == 200 else "detail"], str)
    return statuses
