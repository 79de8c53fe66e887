"""forward_backward bodies as the SDKs send them: protobuf made by the real SDK, JSON as the older ones do."""

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

if TYPE_CHECKING:  # processes with the SDK alone need no API
    from tests.api.support.world import Json, World


def datum(tokens: Sequence[int], weights: Sequence[float] | None = None) -> types.Datum:
    count = len(tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.asarray(tokens, np.int64)),
            "weights": types.TensorData.from_numpy(
                np.asarray(weights or [1.0] * count, np.float32),
            ),
        },
    )


def protobuf(
    model_id: str, seq_id: int, *data: types.Datum, forward_only: bool = False, **changes: Any
) -> bytes:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=list(data or [datum([1, 2, 3])]), **{"loss_fn": "cross_entropy", **changes}
        ),
        model_id=model_id,
        seq_id=seq_id,
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


def old_json(model_id: str, seq_id: int, key: str = "forward_backward_input") -> "Json":
    """SDK 0.8: no `type` anywhere, explicit nulls."""
    tensor = {"data": [1, 2], "dtype": "int64", "shape": [2]}
    inputs = {"target_tokens": tensor, "weights": {"data": [1.0, 0.0], "dtype": "float32", "shape": None}}
    return {
        key: {
            "data": [{"model_input": {"chunks": [{"tokens": [5, 6]}]}, "loss_fn_inputs": inputs}],
            "loss_fn": "cross_entropy",
            "loss_fn_config": None,
        },
        "model_id": model_id,
        "seq_id": seq_id,
    }


async def post_pass(world: "World", body: bytes | AsyncIterator[bytes], **headers: str) -> httpx.Response:
    return await world.http.post(
        "forward_backward", content=body, headers={"Content-Type": "application/x-protobuf", **headers}
    )
