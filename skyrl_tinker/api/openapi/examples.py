"""Example bodies, one per message, shown in /docs; they are valid once their ids are replaced."""

from collections.abc import Mapping
from typing import Any

from skyrl_tinker.protocol.protobuf.json_passes import ForwardBackwardJson, ForwardJson
from skyrl_tinker.protocol.schemas.administration import (
    AdoptRequest,
    ChangeBaseRequest,
    CreateKeyRequest,
    LimitKeyRequest,
    RotateKeyRequest,
)
from skyrl_tinker.protocol.schemas.base import Message
from skyrl_tinker.protocol.schemas.chats import ChatCompletionRequest
from skyrl_tinker.protocol.schemas.console import ReportRequest
from skyrl_tinker.protocol.schemas.futures import (
    CancelFutureRequest,
    RetrieveFutureRequest,
    RetrieveFuturesRequest,
)
from skyrl_tinker.protocol.schemas.losses import CreateCustomLossRequest
from skyrl_tinker.protocol.schemas.openai import CompletionRequest
from skyrl_tinker.protocol.schemas.runs import CopyWeightsRequest, SetTtlRequest, WeightsInfoRequest
from skyrl_tinker.protocol.schemas.sampling import (
    AsampleRequest,
    CreateSamplingSessionRequest,
    JoinSamplingSessionRequest,
)
from skyrl_tinker.protocol.schemas.session import (
    ClientConfigRequest,
    CreateSessionRequest,
    FinishSessionRequest,
    HeartbeatRequest,
)
from skyrl_tinker.protocol.schemas.session_list import SessionSearchRequest, SetProjectRequest
from skyrl_tinker.protocol.schemas.training import (
    CreateModelRequest,
    CreateViaLoadRequest,
    GetInfoRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveExternalRequest,
    SaveSamplerRequest,
    SaveWeightsRequest,
    UnloadModelRequest,
)

Json = dict[str, Any]

_SESSION = "3f0c1a52-6f0e-4c39-9a53-0c3f4f1b7d11"
_MODEL = f"{_SESSION}:train:0"
_SAMPLER = f"{_SESSION}:sample:0"
_REQUEST = "9d2f4b7c1e0a4f6f8f1c2d3e4a5b6c7d"
_WEIGHTS = f"tinker://{_MODEL}/weights/step-100"
_TEXT = {"type": "encoded_text", "tokens": [40, 7, 11]}
_LANE = {"model_id": _MODEL, "seq_id": 1}


def _tensor(dtype: str, *values: float) -> Json:
    return {"data": list(values), "dtype": dtype, "shape": [len(values)]}


_PASS = {
    "loss_fn": "cross_entropy",
    "data": [
        {
            "model_input": {"chunks": [_TEXT]},
            "loss_fn_inputs": {
                "target_tokens": _tensor("int64", 7, 11, 0),
                "weights": _tensor("float32", 0.0, 1.0, 1.0),
            },
        }
    ],
}
TELEMETRY = {"session_id": _SESSION, "sdk_version": "0.38.0", "platform": "Linux", "events": []}
_LOSS_AND_METRICS = {"tuple": [{"ref": "neg"}, {"dict": {"custom/weighted:sum": {"ref": "neg"}}}]}
_LOGPROBS, _WEIGHT_INPUT = {"ref": "logprobs"}, {"ref": "weights"}

EXAMPLES: Mapping[type[Message], Json] = {
    ClientConfigRequest: {"sdk_version": "0.38.0"},
    CreateSessionRequest: {"tags": ["demo"], "user_metadata": {"run": "1"}, "sdk_version": "0.38.0"},
    HeartbeatRequest: {"session_id": _SESSION},
    FinishSessionRequest: {"reason": {"type": "success"}, "detail": None},
    SessionSearchRequest: {"user_metadata": {"run": "1"}, "statuses": [{"type": "active"}], "limit": 50},
    SetProjectRequest: {"project_id": "my-project"},
    CreateModelRequest: {
        "session_id": _SESSION,
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 32, "train_mlp": True, "train_attn": True, "train_unembed": True},
    },
    CreateViaLoadRequest: {"session_id": _SESSION, "model_seq_id": 0, "path": _WEIGHTS, "optimizer": True},
    LoadWeightsRequest: {**_LANE, "path": _WEIGHTS, "optimizer": True},
    UnloadModelRequest: {"model_id": _MODEL},
    GetInfoRequest: {"model_id": _MODEL},
    WeightsInfoRequest: {"tinker_path": _WEIGHTS},
    ForwardBackwardJson: {**_LANE, "forward_backward_input": _PASS},
    ForwardJson: {**_LANE, "forward_input": _PASS},
    OptimStepRequest: {**_LANE, "seq_id": 2, "adam_params": {"learning_rate": 1e-4}},
    CreateCustomLossRequest: {
        "session_id": _SESSION,
        "custom_loss_seq_id": 0,
        "name": "weighted",
        "inputs": [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}],
        "graph": {
            "format": 1,
            "nodes": [
                {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
                {"op": "placeholder", "name": "weights", "target": "weights", "args": [], "kwargs": {}},
                {
                    "op": "call_function",
                    "name": "mul",
                    "target": "operator.mul",
                    "args": [_LOGPROBS, _WEIGHT_INPUT],
                    "kwargs": {},
                },
                {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "mul"}]},
                {"op": "call_function", "name": "neg", "target": "operator.neg", "args": [{"ref": "sum_1"}]},
                {"op": "output", "name": "output", "target": "output", "args": [_LOSS_AND_METRICS]},
            ],
        },
    },
    SaveWeightsRequest: {**_LANE, "path": "step-100", "ttl_seconds": 86400, "overwrite": False},
    SaveSamplerRequest: {**_LANE, "sampling_session_seq_id": 0, "kind": "snapshot"},
    SaveExternalRequest: {**_LANE, "path": "final", "ttl_seconds": 3600},
    SetTtlRequest: {"ttl_seconds": 86400},
    CopyWeightsRequest: {"source_path": _WEIGHTS, "destination_project_id": "my-project"},
    CreateSamplingSessionRequest: {
        "session_id": _SESSION,
        "sampling_session_seq_id": 0,
        "base_model": "tiny",
    },
    JoinSamplingSessionRequest: {"sampling_session_id": _SAMPLER},
    AsampleRequest: {
        "sampling_session_id": _SAMPLER,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [_TEXT]},
        "sampling_params": {"max_tokens": 16, "temperature": 0.7, "seed": 1},
    },
    RetrieveFutureRequest: {"request_id": _REQUEST},
    RetrieveFuturesRequest: {
        "target": {"type": "sampling_session", "sampling_session_id": _SAMPLER, "cloned_sampler_id": 0},
        "prev_cursor": 0,
        "timeout": 0.0,
    },
    CreateKeyRequest: {"name": "alice", "admin": False, "expires_in_s": 7776000},
    RotateKeyRequest: {"overlap_s": 3600},
    AdoptRequest: {"former": "7"},
    ChangeBaseRequest: {"base_model": "tiny", "action": "stop"},
    LimitKeyRequest: {"limits": {"models": 4, "stored_gb": 200, "sessions": "default"}},
    ReportRequest: {"step": 7, "values": {"reward": 0.5, "length": 212.0}},
    CancelFutureRequest: {"request_id": _REQUEST},
    CompletionRequest: {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16},
    ChatCompletionRequest: {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 16,
    },
}
