"""The parsed size of a protobuf message is bounded without parsing it."""

import random

import pytest

from skyrl_tinker.errors import TooLargeError
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.protobuf.size_guard import MAX_PARTS, UNCOUNTED_BYTES, count_parts
from tests.protocol.support.messages import csr, put, request, tensor

MESSAGE = pb.ForwardBackwardRequest.DESCRIPTOR


def test_fields_of_all_levels_are_counted_and_bytes_are_not_looked_into() -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for datums in range(1, 5):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = b"\x0a\x00" * 4 * datums
        datum.loss_fn_inputs["x"].CopyFrom(tensor([1.0] * 100, shape=(100,)))
        # the datum; chunk, encoded_text, tokens; entry, key, value, dense, dtype, shape and its number
        assert count_parts(message.SerializeToString(), MESSAGE, 10**9) == 3 + 11 * datums


def test_counting_ends_soon_after_it_is_too_much() -> None:
    body = b"\x1a\x00" * 100_000
    assert count_parts(body, MESSAGE, 10**9) == 100_000
    assert count_parts(body, MESSAGE, 500) == 501


def test_numbers_of_a_packed_field_count() -> None:
    message = request()
    put("weights", tensor([0.0], shape=(1,) * 1000))(message)
    assert count_parts(message.SerializeToString(), MESSAGE, 10**9) > 1000


def test_random_bytes_are_counted_to_some_end() -> None:
    source = random.Random(1)
    message = request()
    put("weights", csr([1.0], [0, 1, 1, 1], [0], (3, 2)))(message)
    valid = message.SerializeToString()
    for _ in range(2000):
        body = source.randbytes(source.randrange(200))
        torn = valid[: source.randrange(len(valid))] + body
        assert count_parts(body, MESSAGE, 10**9) >= 0
        assert count_parts(torn, MESSAGE, 10**9) >= 0


@pytest.mark.parametrize("start", [b"\x1a\x00", b"\x2a\x00", b"\x1b"])
def test_a_large_body_of_too_many_is_refused_by_their_number(start: bytes) -> None:
    body = start * (UNCOUNTED_BYTES + MAX_PARTS)
    with pytest.raises(TooLargeError, match=f"more than {MAX_PARTS}"):
        pass_requests.decode_forward_backward(body)
