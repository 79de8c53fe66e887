"""Unknown keys of requests: refused by name where keys change a result, and no SDK sends one."""

from typing import Any

import pytest
import tinker.types as sdk
from tinker.types._pydantic_types.tensor_data import TensorData
from tinker.types.sample_request import SampleRequest

from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.base import Message, StrictMessage, StrictRequest, parse
from skyrl_tinker.protocol.schemas.futures import RetrieveFutureRequest, RetrieveFuturesRequest
from skyrl_tinker.protocol.schemas.losses import CreateCustomLossRequest, CustomLossNode
from skyrl_tinker.protocol.schemas.runs import CopyWeightsRequest
from skyrl_tinker.protocol.schemas.sampling import (
    AsampleRequest,
    Chunk,
    CreateSamplingSessionRequest,
    JoinSamplingSessionRequest,
    TensorJson,
    WireSamplingParams,
)
from skyrl_tinker.protocol.schemas.session import ClientConfigRequest, CreateSessionRequest, HeartbeatRequest
from skyrl_tinker.protocol.schemas.session_list import SessionSearchRequest
from skyrl_tinker.protocol.schemas.training import (
    CreateModelRequest,
    CreateViaLoadRequest,
    LoadWeightsRequest,
    LoraConfig,
    OptimStepRequest,
    SaveExternalRequest,
    SaveSamplerRequest,
    SaveWeightsRequest,
    UnloadModelRequest,
)

CREATE = {"session_id": "s", "model_seq_id": 0, "base_model": "m", "lora_config": {"rank": 8}}
STEP = {"model_id": "m", "seq_id": 1, "adam_params": {}}
SAVE = {"model_id": "m", "seq_id": 1, "path": "w"}
SAMPLE = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}}
NODE = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
LOSS = {
    "session_id": "s",
    "custom_loss_seq_id": 0,
    "name": "l",
    "inputs": [{"name": "logprobs", "rank": 1}],
    "graph": {"nodes": [NODE]},
}


@pytest.mark.parametrize(
    ("model", "payload", "message"),
    [
        (
            CreateModelRequest,
            CREATE | {"lora_config": {"rank": 8, "alpha": 16}},
            "lora_config has the unknown key 'alpha', expected rank, seed, train_unembed, train_mlp, ",
        ),
        (CreateModelRequest, CREATE | {"lora_rank": 8}, "body has the unknown key 'lora_rank', expected "),
        (LoadWeightsRequest, SAVE | {"optimizer_config": {}}, "body has the unknown key 'optimizer_config'"),
        (CreateViaLoadRequest, CREATE | {"path": "w"}, "body has the unknown key 'lora_config'"),
        (OptimStepRequest, STEP | {"learning_rate": 1e-4}, "body has the unknown key 'learning_rate'"),
        (SaveWeightsRequest, SAVE | {"ttl": 3600}, "unknown key 'ttl', expected .*ttl_seconds, overwrite"),
        (SaveExternalRequest, SAVE | {"overwrite": True}, "body has the unknown key 'overwrite'"),
        (SaveSamplerRequest, SAVE | {"overwrite": True}, "body has the unknown key 'overwrite'"),
        (UnloadModelRequest, {"model_id": "m", "force": True}, "body has the unknown key 'force'"),
        (
            AsampleRequest,
            SAMPLE | {"sampling_params": {"min_p": 0.1}},
            "^sampling_params has the unknown key 'min_p', expected max_tokens, seed, stop, temperature, ",
        ),
        (
            AsampleRequest,
            SAMPLE | {"prompt": {"chunks": [{"tokens": [1]}, {"tokens": [1], "text": "a"}]}},
            "^prompt.chunks.1 has the unknown key 'text', expected type, tokens$",
        ),
        (AsampleRequest, SAMPLE | {"n": 4}, "body has the unknown key 'n', expected .*num_samples"),
        (
            CreateSamplingSessionRequest,
            {"session_id": "s", "sampling_session_seq_id": 0, "path": "w"},
            "body has the unknown key 'path', expected .*base_model, model_path",
        ),
        (
            CreateCustomLossRequest,
            LOSS | {"graph": {"nodes": [NODE | {"kwarg": {}}]}},
            "graph.nodes.0 has the unknown key 'kwarg', expected op, name, target, args, kwargs",
        ),
        (CopyWeightsRequest, {"source_path": "w", "project_id": "p"}, "the unknown key 'project_id'"),
        (SessionSearchRequest, {"project": "p"}, "body has the unknown key 'project', expected session_id, "),
        (AsampleRequest, SAMPLE | {"x" * 1000: 1}, r"unknown key 'x{70,}\.\.\., expected"),
    ],
)
def test_an_unknown_key_is_named_with_its_place_and_those_expected(
    model: type[Message], payload: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        parse(model, payload)


def test_an_unknown_key_that_is_null_counts_as_absent() -> None:
    payload = CREATE | {"option_of_a_newer_sdk": None, "lora_config": {"rank": 8, "alpha": None}}
    assert parse(CreateModelRequest, payload) == parse(CreateModelRequest, CREATE)


def test_the_request_s_name_may_come_with_it() -> None:
    assert parse(SaveWeightsRequest, SAVE | {"type": "save_weights"}).path == "w"


def test_chunks_of_other_kinds_are_refused_by_kind_not_by_their_keys() -> None:
    image = {"data": "", "format": "png", "expected_tokens": 3}
    assert [parse(Chunk, image).type, parse(Chunk, image | {"type": "image"}).type] == ["image", "image"]


@pytest.mark.parametrize(
    ("model", "payload"),
    [
        (CreateSessionRequest, {}),
        (HeartbeatRequest, {"session_id": "s"}),
        (ClientConfigRequest, {}),
        (RetrieveFutureRequest, {"request_id": "r"}),
    ],
)
def test_requests_that_inform_or_poll_may_have_keys_of_a_newer_sdk(
    model: type[Message], payload: Any
) -> None:
    assert parse(model, payload | {"newer": True}) == parse(model, payload)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (sdk.CreateModelRequest, CreateModelRequest),
        (sdk.LoraConfig, LoraConfig),
        (sdk.SaveWeightsRequest, SaveWeightsRequest),
        (sdk.SaveWeightsForSamplerRequest, SaveSamplerRequest),
        (sdk.SaveWeightsExternalRequest, SaveExternalRequest),
        (sdk.UnloadModelRequest, UnloadModelRequest),
        (SampleRequest, AsampleRequest),
        (sdk.SamplingParams, WireSamplingParams),
        (TensorData, TensorJson),
        (sdk.EncodedTextChunk, Chunk),
        (sdk.CreateSamplingSessionRequest, CreateSamplingSessionRequest),
        (sdk.JoinSamplingSessionRequest, JoinSamplingSessionRequest),
        (sdk.CreateCustomLossRequest, CreateCustomLossRequest),
        (sdk.CustomLossNode, CustomLossNode),
        (sdk.CopyWeightsRequest, CopyWeightsRequest),
        (sdk.SessionSearchRequest, SessionSearchRequest),
    ],
)
def test_every_key_of_the_sdk_is_known(theirs: Any, ours: type[StrictMessage]) -> None:
    """No version from 0.3.0 on has sent another one."""
    known = {field.alias or name for name, field in ours.model_fields.items()}
    assert set(theirs.model_fields) <= known
    assert issubclass(ours, StrictRequest) == ("type" in theirs.model_fields) or ours is Chunk


def test_a_load_may_name_its_model_or_its_session_as_the_sdk_does() -> None:
    """The SDK has one class for both; it leaves out what it does not set."""
    in_place = sdk.LoadWeightsRequest(model_id="m", seq_id=1, path="w", optimizer=True)
    new = sdk.LoadWeightsRequest(session_id="s", model_seq_id=0, path="w", optimizer=True)
    for request, model in ((in_place, LoadWeightsRequest), (new, CreateViaLoadRequest)):
        for sent in (request.model_dump(mode="json"), request.model_dump(exclude_none=True, mode="json")):
            assert parse(model, sent).path == "w"


@pytest.mark.parametrize(
    ("model", "payload", "where"),
    [
        (CreateSessionRequest, {"tags": [{}] * 1000, "sdk_version": "0"}, "tags.0"),
        (RetrieveFuturesRequest, {"retrieved_request_ids": [1] * 1000}, "retrieved_request_ids.0"),
        (CreateCustomLossRequest, {"inputs": [1] * 1000}, "inputs.0"),
        (AsampleRequest, {"prompt": {"chunks": [1] * 1000}}, "prompt.chunks.0"),
    ],
)
def test_of_many_wrong_items_the_first_is_named(
    model: type[Message], payload: dict[str, Any], where: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse(model, payload)
    assert where in str(caught.value)
    assert len(str(caught.value)) < 1000
