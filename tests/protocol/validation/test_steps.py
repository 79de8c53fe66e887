"""Models, optimizer steps, saves and loads: refusals and stored values."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import tinker

from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.values import AdamParams, BaseModelFacts, DimuonParams, LoraSpec
from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.sampling import TensorJson
from skyrl_tinker.protocol.schemas.training import (
    CreateModelRequest,
    CreateViaLoadRequest,
    LoadWeightsRequest,
    LoraConfig,
    OptimStepRequest,
    SaveExternalRequest,
    SaveSamplerRequest,
    SaveWeightsRequest,
)
from skyrl_tinker.protocol.stored_requests import (
    CreateViaLoadBody,
    LoadWeightsBody,
    SaveExternalBody,
    SaveSamplerBody,
    SaveWeightsBody,
)
from skyrl_tinker.protocol.validation.limits import Limits
from skyrl_tinker.protocol.validation.models import validate_lora_config, validate_optimizer_config
from skyrl_tinker.protocol.validation.steps import (
    validate_create_via_load,
    validate_load_weights,
    validate_optim_step,
    validate_save_external,
    validate_save_sampler,
    validate_save_weights,
    validate_step_params,
)

LIMITS = Limits("tiny", vocab_size=10, context_length=8, max_datums=3, max_lora_rank=8)
BASES = Bases((BaseModelFacts("/models/m", ("m",), "Qwen3ForCausalLM", 10, 8, 2, 1, 64, 64, True, (0,)),))
OF_MODEL = {"model_id": "s:train:0", "seq_id": 3}


def test_adam_defaults_are_the_sdks() -> None:
    full = tinker.AdamParams().model_dump()
    assert validate_step_params({}, None) == validate_step_params(full, None) == AdamParams()
    assert validate_step_params({"learning_rate": 1}, None) == AdamParams(learning_rate=1.0)


@pytest.mark.parametrize("key", ["learning_rate", "eps", "weight_decay"])
def test_what_json_has_no_number_for_is_refused(key: str) -> None:
    """Nulls are not taken for absent keys: training would continue with the defaults."""
    sent = json.loads(tinker.AdamParams(**{key: float("nan")}).model_dump_json())
    assert sent[key] is None
    with pytest.raises(UserError, match=f"adam_params.{key} is null .*expected a finite number"):
        validate_step_params(sent, None)


def test_an_optim_step_of_the_sdk_arrives_as_it_was_built() -> None:
    sent = tinker.types.OptimStepRequest(
        adam_params=tinker.AdamParams(learning_rate=0.5, beta1=0.0, weight_decay=0.1, grad_clip_norm=2.0),
        **OF_MODEL,
    )
    body = validate_optim_step(parse(OptimStepRequest, sent.model_dump(exclude_none=True, mode="json")))
    assert body.params == AdamParams(learning_rate=0.5, beta1=0.0, weight_decay=0.1, grad_clip_norm=2.0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"learning_rate": -1e-4}, "adam_params.learning_rate is -0.0001, expected a finite number >= 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan, expected a finite number >= 0"),
        ({"learning_rate": float("inf")}, "learning_rate is inf"),
        ({"learning_rate": 10**400}, "learning_rate is 1"),
        ({"learning_rate": 1e39}, r"learning_rate is 1e\+39, expected a finite number >= 0 in float32"),
        ({"weight_decay": 3.5e38}, r"weight_decay is 3.5e\+38, expected a finite number >= 0 in float32"),
        ({"eps": 1e300}, r"eps is 1e\+300, expected a finite number >= 1e-37 in float32"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'"),
        ({"learning_rate": True}, "learning_rate is True"),
        ({"beta1": 1.0}, r"adam_params.beta1 is 1.0, expected a number in \[0, 1\)"),
        ({"beta2": -0.1}, r"adam_params.beta2 is -0.1, expected a number in \[0, 1\)"),
        ({"eps": -1e-9}, "adam_params.eps is -1e-09, expected a finite number >= 1e-37"),
        ({"eps": 0.0}, "adam_params.eps is 0.0, expected a finite number >= 1e-37"),
        ({"weight_decay": -1}, "adam_params.weight_decay is -1"),
        ({"grad_clip_norm": -1}, "adam_params.grad_clip_norm is -1"),
        ({"type": "dimuon"}, "adam_params.type is 'dimuon', expected 'adamw' or none"),
        ({"lr": 1}, "adam_params has the unknown key 'lr', expected learning_rate, beta1"),
        (None, "adam_params and optimizer_params are both missing"),
    ],
)
def test_wrong_adam_params_are_named(params: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate_step_params(params, None)


def test_a_dimuon_step_keeps_what_the_sdk_sent() -> None:
    params = tinker.DimuonParams(learning_rate=0.5, beta1=0.8, grad_clip_norm=-1.0)
    sent = tinker.types.OptimStepRequest(optim_params=params, **OF_MODEL).model_dump(mode="json")
    body = validate_optim_step(parse(OptimStepRequest, sent))
    assert body.params == DimuonParams(learning_rate=0.5, beta1=0.8, grad_clip_norm=-1.0)
    least = validate_step_params(None, {"type": "dimuon", "learning_rate": 0})
    assert least == DimuonParams(learning_rate=0.0, beta1=0.9, grad_clip_norm=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": -1}, "optimizer_params.learning_rate is -1, expected a finite number >= 0"),
        ({"learning_rate": 1e39}, "optimizer_params.learning_rate is 1e"),
        ({"learning_rate": None}, "optimizer_params.learning_rate is null"),
        ({"beta1": 1.0}, r"optimizer_params.beta1 is 1.0, expected a number in \[0, 1\)"),
        (
            {"grad_clip_norm": float("-inf")},
            "optimizer_params.grad_clip_norm is -inf, expected a finite number",
        ),
        (
            {"beta2": 0.9},
            "optimizer_params has the unknown key 'beta2', expected learning_rate, beta1, grad_",
        ),
        ({"type": "sgd"}, "optimizer_params.type is 'sgd', expected 'dimuon'"),
        ({"type": None}, "optimizer_params.type is None, expected 'dimuon'"),
    ],
)
def test_wrong_optimizer_params_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate_step_params(None, {"type": "dimuon", "learning_rate": 0.1, **change})


def test_a_step_has_the_parameters_of_one_optimizer() -> None:
    with pytest.raises(
        UserError, match="adam_params and optimizer_params are both set, expected exactly one"
    ):
        validate_step_params({}, {"type": "dimuon", "learning_rate": 0.1})


def test_a_type_of_null_is_none() -> None:
    assert validate_step_params({"type": None}, None) == validate_step_params({}, None)


def test_an_optimizer_is_adamw_unless_it_is_said() -> None:
    adamw = {"type": "adamw"}
    assert validate_optimizer_config(None) == validate_optimizer_config(adamw) == adamw
    dimuon = tinker.DimuonOptimizerConfig().model_dump(mode="json")
    assert validate_optimizer_config(dimuon) == validate_optimizer_config({"type": "dimuon"}) == dimuon


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "sgd"}, "optimizer_config.type is 'sgd', expected one of adamw, dimuon"),
        ({"type": ["adamw"]}, r"optimizer_config.type is \[.adamw.\], expected one of adamw, dimuon"),
        ({"type": {}}, r"optimizer_config.type is \{\}, expected one of adamw, dimuon"),
        ({"type": "dimuon", "version": 2}, "optimizer_config.version is 2, expected 1"),
        ({"type": "dimuon", "nesterov": True}, "unknown key 'nesterov', for dimuon expected type, version"),
        ({"type": "adamw", "version": 1}, "unknown key 'version', for adamw expected type"),
    ],
)
def test_wrong_optimizer_configs_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate_optimizer_config(config)


def test_a_lora_config_keeps_its_fields() -> None:
    config = LoraConfig(rank=4, seed=5, train_mlp=False, train_attn=True, train_unembed=False)
    assert validate_lora_config(config, LIMITS) == LoraSpec(4, 5, False, True, False)
    assert validate_lora_config(LoraConfig(rank=0, seed=5), LIMITS).rank == 0


@pytest.mark.parametrize(("seed", "stored"), [(-1, 2**63 - 1), (2**63 + 4, 4), (2**64 - 1, 2**63 - 1)])
def test_lora_seeds_are_reduced_to_63_bits(seed: int, stored: int) -> None:
    assert validate_lora_config(LoraConfig(rank=1, seed=seed), LIMITS).seed == stored


def test_an_absent_lora_seed_is_drawn_once() -> None:
    seeds = {validate_lora_config(LoraConfig(rank=1), LIMITS).seed for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "lora_config is missing"),
        (LoraConfig(rank=-1), "lora_config.rank is -1, expected 0"),
        (LoraConfig(rank=9), r"rank is 9, expected 0 .* to 8 \(.* max_lora_rank of base model tiny\)"),
        (
            LoraConfig(rank=1, train_mlp=False, train_attn=False, train_unembed=False),
            "lora_config trains nothing",
        ),
        (LoraConfig(rank=0, train_unembed=False), "lora_config.train_unembed is false, expected true with"),
    ],
)
def test_a_wrong_lora_config_is_named(config: LoraConfig | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate_lora_config(config, LIMITS)


def test_saves_keep_what_the_sdk_sent() -> None:
    sent = tinker.types.SaveWeightsRequest(
        path="0001", ttl_seconds=3600, overwrite=True, user_metadata={"a": "b"}, **OF_MODEL
    )
    body = validate_save_weights(parse(SaveWeightsRequest, sent.model_dump(mode="json")))
    assert body == SaveWeightsBody("0001", 3600, True, {"a": "b"})
    old = parse(SaveWeightsRequest, {**OF_MODEL, "path": "0001", "ttl_seconds": None, "user_metadata": None})
    assert validate_save_weights(old) == SaveWeightsBody("0001")


def test_sampler_saves_are_named_or_ephemeral() -> None:
    named = tinker.types.SaveWeightsForSamplerRequest(path="a", **OF_MODEL).model_dump(mode="json")
    assert validate_save_sampler(parse(SaveSamplerRequest, named)) == SaveSamplerBody(name="a")
    ephemeral = tinker.types.SaveWeightsForSamplerRequest(sampling_session_seq_id=4, **OF_MODEL).model_dump(
        mode="json"
    )
    body = validate_save_sampler(parse(SaveSamplerRequest, ephemeral))
    assert body == SaveSamplerBody(sampling_session_seq_id=4)
    for wrong in ({}, {"path": "a", "sampling_session_seq_id": 4}):
        with pytest.raises(UserError, match="expected exactly one of path"):
            validate_save_sampler(parse(SaveSamplerRequest, {**OF_MODEL, **wrong}))


def test_only_an_ephemeral_save_can_be_inflight() -> None:
    inflight = tinker.types.SaveWeightsForSamplerRequest(
        sampling_session_seq_id=4, kind="inflight", **OF_MODEL
    ).model_dump(mode="json")
    body = validate_save_sampler(parse(SaveSamplerRequest, inflight))
    assert body == SaveSamplerBody(sampling_session_seq_id=4, kind="inflight")
    assert SaveSamplerBody.from_bytes(body.to_bytes()) == body
    for change, message in (
        ({"path": "a", "sampling_session_seq_id": None}, "kind is 'inflight', expected 'snapshot': a named"),
        ({"kind": "mutable"}, "kind is 'mutable', expected 'snapshot' or 'inflight'"),
        ({"ttl_seconds": 3600}, "ttl_seconds is 3600, expected none"),
    ):
        with pytest.raises(UserError, match=message):
            validate_save_sampler(parse(SaveSamplerRequest, {**inflight, **change}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": ""}, "checkpoint name is ''"),
        ({"path": "../x"}, "checkpoint name is '../x', expected a letter or digit"),
        ({"ttl_seconds": 3599}, r"ttl_seconds is 3599, expected 3600 \(1 hour\) to 315360000 \(10 years\)"),
        ({"ttl_seconds": 315360001}, "ttl_seconds is 315360001"),
    ],
)
def test_a_wrong_save_is_named(change: dict[str, Any], message: str) -> None:
    body = {**OF_MODEL, "path": "ok", **change}
    with pytest.raises(UserError, match=message):
        validate_save_weights(parse(SaveWeightsRequest, body))
    with pytest.raises(UserError, match=message):
        validate_save_sampler(parse(SaveSamplerRequest, body))


PATH = "tinker://s:train:0/weights/0001"


def test_both_forms_of_load_weights_keep_what_the_sdk_sent() -> None:
    in_place = tinker.types.LoadWeightsRequest(path=PATH, optimizer=True, **OF_MODEL).model_dump(mode="json")
    assert validate_load_weights(parse(LoadWeightsRequest, in_place)) == LoadWeightsBody(PATH, True)
    oldest = {**OF_MODEL, "path": PATH}
    assert validate_load_weights(parse(LoadWeightsRequest, oldest)) == LoadWeightsBody(PATH, False)
    create = tinker.types.LoadWeightsRequest(
        session_id="s", model_seq_id=2, base_model="m", path=PATH, optimizer=False, user_metadata={"a": 1}
    ).model_dump(mode="json")
    request = parse(CreateViaLoadRequest, create)
    assert (request.session_id, request.model_seq_id, request.user_metadata) == ("s", 2, {"a": 1})
    assert validate_create_via_load(request, BASES) == CreateViaLoadBody(PATH, False, "m", {"type": "adamw"})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"path": "weights/1"}, UserError, "'weights/1' is not a checkpoint path: expected tinker://"),
        ({"weights_access_token": "x"}, NotSupportedError, "weights_access_token is set"),
        ({"base_model": "x"}, UserError, "base_model is 'x', expected one that trains: m$"),
        (
            {"optimizer": True, "optimizer_config": {"type": "adamw"}},
            UserError,
            "optimizer_config is set, expected none",
        ),
        ({"optimizer_config": {"type": "sgd"}}, NotSupportedError, "optimizer_config.type is 'sgd'"),
    ],
)
def test_a_wrong_create_from_checkpoint_is_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    body = {"session_id": "s", "model_seq_id": 0, "path": PATH, "optimizer": False, **change}
    with pytest.raises(error, match=message):
        validate_create_via_load(parse(CreateViaLoadRequest, body), BASES)


def test_loading_in_place_refuses_what_is_not_a_path_of_ours() -> None:
    with pytest.raises(UserError, match="is not a checkpoint path"):
        validate_load_weights(parse(LoadWeightsRequest, {**OF_MODEL, "path": "/etc/passwd"}))
    with pytest.raises(NotSupportedError, match="weights_access_token is set"):
        validate_load_weights(
            parse(LoadWeightsRequest, {**OF_MODEL, "path": PATH, "weights_access_token": "x"})
        )


def test_create_model_of_old_sdks_may_leave_out_nearly_everything() -> None:
    body = {
        "session_id": "s",
        "model_seq_id": 0,
        "base_model": "m",
        "user_metadata": None,
        "lora_config": {"rank": 4, "seed": None},
    }
    request = parse(CreateModelRequest, body)
    assert request.user_metadata == {}
    assert request.lora_config == LoraConfig(rank=4)


AGE = "age1ceyx79esr8fuvpu2zf80q6t59f8hc7l5v6keafx23pdfsdq6mpkqpsjwln"
SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBNosUbSZqTM05lza5BM7DM3hU49KByGLzKoyGCF35Jv somebody"


def test_an_export_is_for_everybody_or_for_those_whose_keys_it_names() -> None:
    plain = SaveExternalRequest(**OF_MODEL, path="a", ttl_seconds=3600)
    assert validate_save_external(plain) == SaveExternalBody("a", 3600)
    closed = SaveExternalRequest(**OF_MODEL, path="a", age_encryption_recipients=[AGE, SSH])
    assert validate_save_external(closed) == SaveExternalBody("a", None, [AGE, SSH])


@pytest.mark.parametrize(
    ("recipients", "message"),
    [
        ([], "age_encryption_recipients has 0 entries, expected 1 to 100"),
        ([AGE] * 101, "has 101 entries"),
        ([AGE, AGE[:-1]], r"age_encryption_recipients\[1\] is 'age1ceyx.*expected an age public key"),
        ([SSH, "ssh-ed25519 AAAA"], r"recipients\[1\] is 'ssh-ed25519 AAAA', expected"),
        ([""], r"recipients\[0\] is ''"),
        (["ä" * 200], r"recipients\[0\] is 'ä{77}\.\.\.'"),
    ],
)
def test_a_malformed_recipient_is_named_with_its_position(recipients: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate_save_external(
            SaveExternalRequest(**OF_MODEL, path="a", age_encryption_recipients=recipients)
        )


def test_a_secret_key_given_as_recipient_is_not_repeated() -> None:
    secret = "AGE-SECRET-KEY-1QQPQGZQFPUQ"
    wrong = SaveExternalRequest(**OF_MODEL, path="a", age_encryption_recipients=[secret])
    with pytest.raises(UserError, match=r"recipients\[0\] is a secret key, expected") as refused:
        validate_save_external(wrong)
    assert secret not in str(refused.value)


class _Untouchable:
    def __repr__(self) -> str:
        raise AssertionError("the end of a long value was looked at")


_LONG: Any = ["x" * 60] * 2 + [_Untouchable()]


def _refuse_pass(field: str, value: Any) -> None:
    tensors = {"target_tokens": {"data": [1], "dtype": value if field == "dtype" else "int64"}}
    data = [{"model_input": {"chunks": []}, "loss_fn_inputs": tensors}]
    config = {"a": value} if field == "config" else {}
    body = {"data": data, "loss_fn": "cross_entropy", "loss_fn_config": config}
    request = {"model_id": "m", "seq_id": 1, "forward_backward_input": body}
    if (problem := pass_requests.decode_forward_backward_json(request).problem) is not None:
        raise problem


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: validate_step_params({"beta1": _LONG}, None),
        lambda: validate_step_params(None, {"type": _LONG}),
        lambda: validate_optimizer_config({"type": _LONG}),
        lambda: validate_optimizer_config({"type": "dimuon", "version": _LONG}),
        lambda: parse(TensorJson, {"data": [], "dtype": "int64", "shape": _LONG}),
        lambda: _refuse_pass("config", _LONG),
        lambda: _refuse_pass("dtype", _LONG),
    ],
)
def test_of_a_long_value_only_the_beginning_is_written(refuse: Callable[[], object]) -> None:
    with pytest.raises(UserError, match=r"x\.\.\.") as refused:
        refuse()
    assert len(str(refused.value)) < 300
