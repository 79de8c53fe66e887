"""Requests as SDKs old and new send them; responses read by the SDK's own models."""

from datetime import UTC, datetime
from typing import Any

import pytest
import tinker.types as sdk
from tinker.types._pydantic_types.save_weights_external_response import SaveWeightsExternalResponseInternal
from tinker.types.try_again_response import TryAgainResponse as SdkTryAgainResponse

from skyrl_tinker.domain.values import Failure
from skyrl_tinker.errors import MOST_CHARACTERS, UserError
from skyrl_tinker.protocol.schemas.base import Message, Text, parse, shorten, utc
from skyrl_tinker.protocol.schemas.futures import (
    AcceptedFuture,
    FailedResponse,
    RetrieveFutureRequest,
    TryAgainResponse,
)
from skyrl_tinker.protocol.schemas.losses import CreateCustomLossResult
from skyrl_tinker.protocol.schemas.runs import (
    Checkpoint,
    TrainingRun,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from skyrl_tinker.protocol.schemas.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
)
from skyrl_tinker.protocol.schemas.session import (
    ClientConfigRequest,
    ClientConfigResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    DynamicConfigResponse,
    FinishSessionRequest,
    HealthResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    ServerCapabilitiesResponse,
    SupportedModel,
    TelemetryResponse,
)
from skyrl_tinker.protocol.schemas.session_list import SessionSearchRequest
from skyrl_tinker.protocol.schemas.training import (
    CreateModelRequest,
    CreateModelResult,
    GetInfoRequest,
    GetInfoResponse,
    LoadWeightsResult,
    ModelData,
    OptimStepResult,
    SaveExternalResult,
    SaveSamplerRequest,
    SaveSamplerResult,
    SaveWeightsRequest,
    SaveWeightsResult,
)
from tests.protocol.support.messages import read_by_the_sdk

NOW = utc(1_700_000_000.5)


def test_times_carry_a_timezone() -> None:
    assert datetime(2023, 11, 14, 22, 13, 20, 500000, UTC) == NOW


def test_a_session_request_may_be_bare_or_full() -> None:
    bare = parse(CreateSessionRequest, {"tags": None, "user_metadata": None, "project_id": None})
    assert (bare.tags, bare.user_metadata, bare.project_id) == ([], {}, None)
    sent = sdk.CreateSessionRequest(
        tags=["a"], user_metadata={"b": 1}, sdk_version="0.38.0", display_name="c"
    )
    full = parse(CreateSessionRequest, sent.model_dump(exclude_none=True, mode="json"))
    assert (full.tags, full.user_metadata, full.sdk_version, full.display_name) == (
        ["a"],
        {"b": 1},
        "0.38.0",
        "c",
    )


def test_small_requests_are_read() -> None:
    assert parse(ClientConfigRequest, {"sdk_version": "0.38.0"}).sdk_version == "0.38.0"
    assert parse(HeartbeatRequest, {"session_id": "s", "type": "session_heartbeat"}).session_id == "s"
    finish = parse(FinishSessionRequest, {"reason": {"type": "errored"}, "detail": None})
    assert (finish.reason.type, finish.detail) == ("errored", None)
    assert parse(GetInfoRequest, {"model_id": "m", "type": "get_info"}).model_id == "m"
    assert parse(WeightsInfoRequest, {"tinker_path": "tinker://a"}).tinker_path == "tinker://a"
    assert not parse(RetrieveFutureRequest, {"request_id": "r"}).allow_metadata_only
    session = sdk.CreateSamplingSessionRequest(session_id="s", sampling_session_seq_id=1, base_model="m")
    assert parse(CreateSamplingSessionRequest, session.model_dump(mode="json")).base_model == "m"


def test_errors_name_every_wrong_field_and_what_was_found() -> None:
    with pytest.raises(
        UserError, match=r"^session_id is missing; model_seq_id: .*found '0'; base_model is missing"
    ):
        parse(CreateModelRequest, {"model_seq_id": "0"})
    with pytest.raises(UserError, match=r"^body: .*found \[\]"):
        parse(CreateModelRequest, [])
    with pytest.raises(UserError) as long:
        parse(HeartbeatRequest, {"session_id": ["x" * 10_000]})
    assert len(str(long.value)) < 200


CHECKPOINT = Checkpoint(
    base_model="b",
    owner="o",
    checkpoint_id="weights/a",
    checkpoint_type="training",
    time=NOW,
    tinker_path="tinker://m/weights/a",
    expires_at=NOW,
)

UNREAD: Any = {  # for older SDKs, and for others
    "create_model_via_load_weights": True,
    "supported_models": {"__all__": {"sampler"}},
}
RESPONSES = [
    (
        ClientConfigResponse(
            proto_compress_fwdbwd=True,
            fwdbwd_max_chunk_len=1,
            fwdbwd_max_chunk_bytes_count=2,
            fwdbwd_dispatch_bytes_semaphore_size=3,
            sample_dispatch_bytes_semaphore_size=4,
            inflight_response_bytes_semaphore_size=5,
            sample_max_concurrent_requests=6,
            custom_loss_server_side=True,
            sample_use_retrieve_futures=True,
        ),
        sdk.ClientConfigResponse,
    ),
    (DynamicConfigResponse(), sdk.ClientDynamicConfigResponse),
    (CreateSessionResponse(session_id="s"), sdk.CreateSessionResponse),
    (HeartbeatResponse(), sdk.SessionHeartbeatResponse),
    (TelemetryResponse(), sdk.TelemetryResponse),
    (HealthResponse(), sdk.HealthResponse),
    (
        ServerCapabilitiesResponse(supported_models=[SupportedModel(model_name="m", max_context_length=8)]),
        sdk.GetServerCapabilitiesResponse,
    ),
    (CreateModelResult(model_id="m"), sdk.CreateModelResponse),
    (LoadWeightsResult(path="p", model_id="m"), sdk.LoadWeightsResponse),
    (CreateCustomLossResult(loss_id="l"), sdk.CreateCustomLossResponse),
    (OptimStepResult(metrics={"grad_norm": 1.0}), sdk.OptimStepResponse),
    (SaveWeightsResult(path="p"), sdk.SaveWeightsResponse),
    (SaveExternalResult(path="p", size_bytes=3), SaveWeightsExternalResponseInternal),
    (CreateSamplingSessionResponse(sampling_session_id="s"), sdk.CreateSamplingSessionResponse),
    (GetSamplerResponse(sampler_id="s", base_model="m"), sdk.GetSamplerResponse),
    (WeightsInfoResponse(base_model="m", is_lora=True, lora_rank=4), sdk.WeightsInfoResponse),
    (CHECKPOINT, sdk.Checkpoint),
    (
        TrainingRun(
            training_run_id="m",
            base_model="b",
            model_owner="o",
            is_lora=True,
            last_request_time=NOW,
            last_checkpoint=CHECKPOINT,
        ),
        sdk.TrainingRun,
    ),
    (
        GetInfoResponse(
            model_id="m",
            model_data=ModelData(model_name="b", tokenizer_id="/t"),
            is_lora=True,
            lora_rank=4,
            model_name="b",
        ),
        sdk.GetInfoResponse,
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), RESPONSES, ids=[type(ours).__name__ for ours, _ in RESPONSES])
@pytest.mark.parametrize("exclude_none", [False, True])
def test_the_sdk_reads_our_response(ours: Message, theirs, exclude_none: bool) -> None:
    sent = ours.model_dump(mode="json", exclude_none=exclude_none)
    got = theirs.model_validate(sent).model_dump(mode="json", exclude_none=True)
    expected = read_by_the_sdk(ours.model_dump(mode="json", exclude_none=True, exclude=UNREAD))
    assert {key: value for key, value in got.items() if key in expected} == expected
    assert not {"error", "status"} & set(sent) or ours.__class__.__name__ in {
        "TelemetryResponse",
        "HealthResponse",
    }


def test_sampler_saves_answer_only_the_field_of_their_form() -> None:
    named = SaveSamplerResult(path="p").model_dump(exclude_none=True)
    ephemeral = SaveSamplerResult(sampling_session_id="s").model_dump(exclude_none=True)
    assert named == {"path": "p", "type": "save_weights_for_sampler"}
    assert ephemeral == {"sampling_session_id": "s", "type": "save_weights_for_sampler"}


def test_futures_answer_in_the_forms_the_sdk_tells_apart() -> None:
    accepted = AcceptedFuture(request_id="r", sample_sequence_ids=["r-0"])
    assert sdk.UntypedAPIFuture.model_validate(accepted.model_dump()).request_id == "r"
    waiting = TryAgainResponse(request_id="r", queue_state_reason="training")
    assert SdkTryAgainResponse.model_validate(waiting.model_dump()).queue_state == "active"
    failed = FailedResponse(error="datum 3: …", category="user")
    assert (
        sdk.RequestFailedResponse.model_validate(failed.model_dump()).category
        == sdk.RequestErrorCategory.User
    )


class _Wrong(Message):
    a: int
    b: int
    c: int
    d: int
    e: int
    f: int
    g: int


def test_a_refusal_names_the_first_problems_only() -> None:
    with pytest.raises(UserError) as refused:
        parse(_Wrong, dict.fromkeys("abcdefg", "x"))
    problems = str(refused.value).split("; ")
    assert [problem[0] for problem in problems[:-1]] == list("abcde")
    assert problems[-1] == "and 2 more"


@pytest.mark.parametrize("message", [SaveWeightsRequest, SaveSamplerRequest, SessionSearchRequest])
def test_of_wrong_metadata_the_first_value_is_named_alone(message: type[Message]) -> None:
    with pytest.raises(UserError) as refused:
        parse(message, {"user_metadata": {f"k{number}": number for number in range(30)}})
    assert str(refused.value).count("user_metadata") == 1


def test_names_have_a_length() -> None:
    class Named(Message):
        name: Text

    assert parse(Named, {"name": "é" * 512}).name == "é" * 512
    with pytest.raises(
        UserError, match="name: String should have at most 512 characters, found 'xxx"
    ) as refused:
        parse(Named, {"name": "x" * 513})
    assert len(str(refused.value)) < 200


def test_texts_about_failures_have_a_length() -> None:
    for text in (str(UserError("x" * 10_000)), Failure("x" * 10_000, "server").message):
        assert text.startswith("x" * MOST_CHARACTERS)
        assert len(text) < MOST_CHARACTERS + 30
        assert text.endswith("(10000 characters)")


@pytest.mark.parametrize(
    "value",
    [
        "text",
        "it's",
        'say "it\'s"',
        {},
        [],
        {"a": [1, 2.5, None, True, {}], "b": "c"},
        [[], [[]]],
        7,
        None,
        (1,),
    ],
)
def test_a_short_value_is_shown_as_its_repr(value: object) -> None:
    assert shorten(value) == repr(value)


class _Untouchable:
    def __repr__(self) -> str:
        raise AssertionError("the end of a long value was looked at")


@pytest.mark.parametrize(
    "value", ["x" * 1000, ["x" * 60] * 2 + [_Untouchable()], {"a" * 50: "b" * 50, "c": _Untouchable()}]
)
def test_of_a_long_value_the_beginning_is_shown_and_no_more_is_read(value: object) -> None:
    shown = shorten(value)
    assert len(shown) == 80
    assert shown.endswith("...")
