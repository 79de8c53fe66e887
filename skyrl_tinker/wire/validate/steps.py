"""Optimizer steps, saves and loads."""

import sys
from collections.abc import Mapping
from typing import Any, Literal

from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.wire import paths
from skyrl_tinker.wire.bodies import (
    CreateViaLoadBody,
    LoadWeightsBody,
    OptimStepBody,
    SaveSamplerBody,
    SaveWeightsBody,
)
from skyrl_tinker.wire.models.training import (
    CreateViaLoadRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveSamplerRequest,
    SaveWeightsRequest,
)
from skyrl_tinker.wire.validate.limits import Limits, validate_base_model
from skyrl_tinker.wire.validate.models import validate_optimizer_config
from skyrl_tinker.wire.values import AdamParams

_MOST = sys.float_info.max
_TTL = (3600, 10 * 365 * 86400)  # one hour to ten years
# key: lowest, highest (excluded)
_ADAM: Mapping[str, tuple[float, float]] = {
    "learning_rate": (0.0, _MOST),
    "beta1": (0.0, 1.0),
    "beta2": (0.0, 1.0),
    "eps": (0.0, _MOST),
    "weight_decay": (0.0, _MOST),
    "grad_clip_norm": (0.0, _MOST),
}


def validate_optim_step(request: OptimStepRequest) -> OptimStepBody:
    return OptimStepBody(validate_adam(request.adam_params, request.optimizer_params))


def validate_adam(
    adam_params: Mapping[str, Any] | None, optimizer_params: Mapping[str, Any] | None = None
) -> AdamParams:
    """Missing keys have the protocol's defaults (SDKs up to 0.16 send only what the user set)."""
    if optimizer_params is not None:
        family = optimizer_params.get("type")
        raise NotSupportedError(f"optimizer_params of type {family!r} are not built yet: send adam_params")
    if adam_params is None:
        raise UserError("adam_params is missing")
    unknown = sorted(set(adam_params) - {*_ADAM, "type"})
    if unknown:
        raise UserError(f"adam_params has the unknown key {unknown[0]!r}, expected {', '.join(_ADAM)}")
    given = {key: value for key, value in adam_params.items() if key in _ADAM and value is not None}
    return AdamParams(**{key: _adam_value(key, value) for key, value in given.items()})


def _adam_value(key: str, value: Any) -> float:
    low, high = _ADAM[key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value < high:
        expected = f"a number in [{low:g}, {high:g})" if high < _MOST else f"a finite number >= {low:g}"
        raise UserError(f"adam_params.{key} is {value!r}, expected {expected}")
    return float(value)


def validate_ttl(ttl_seconds: int | None) -> int | None:
    """None = never expires."""
    if ttl_seconds is not None and not _TTL[0] <= ttl_seconds <= _TTL[1]:
        raise UserError(f"ttl_seconds is {ttl_seconds}, expected {_TTL[0]} (1 hour) to {_TTL[1]} (10 years)")
    return ttl_seconds


def validate_save_weights(request: SaveWeightsRequest) -> SaveWeightsBody:
    return SaveWeightsBody(
        name=paths.validate_checkpoint_name(request.path),
        ttl_seconds=validate_ttl(request.ttl_seconds),
        overwrite=request.overwrite,
        user_metadata=request.user_metadata or {},
    )


def validate_save_sampler(request: SaveSamplerRequest) -> SaveSamplerBody:
    """Named or ephemeral, never both; only what is ephemeral can be inflight."""
    if (request.path is None) == (request.sampling_session_seq_id is None):
        raise UserError(
            "expected exactly one of path (a named save) and sampling_session_seq_id (an ephemeral one)"
        )
    return SaveSamplerBody(
        name=None if request.path is None else paths.validate_checkpoint_name(request.path),
        sampling_session_seq_id=request.sampling_session_seq_id,
        kind=_save_kind(request),
        ttl_seconds=validate_ttl(request.ttl_seconds),
        user_metadata=request.user_metadata or {},
    )


def _save_kind(request: SaveSamplerRequest) -> Literal["snapshot", "inflight"]:
    if request.kind == "snapshot":
        return "snapshot"
    if request.kind != "inflight":
        raise UserError(f"kind is {request.kind!r}, expected 'snapshot' or 'inflight'")
    if request.path is not None:
        raise UserError("kind is 'inflight', expected 'snapshot': a named save never changes")
    if request.ttl_seconds is not None:
        raise UserError(
            f"ttl_seconds is {request.ttl_seconds}, expected none: weights of kind 'inflight' "
            "go when they are superseded"
        )
    return "inflight"


def validate_load_weights(request: LoadWeightsRequest) -> LoadWeightsBody:
    _refuse_token(request.weights_access_token)
    return LoadWeightsBody(path=str(paths.parse(request.path)), optimizer=request.optimizer)


def validate_create_via_load(request: CreateViaLoadRequest, limits: Limits) -> CreateViaLoadBody:
    """`optimizer_config` chooses the optimizer of a load without optimizer state."""
    _refuse_token(request.weights_access_token)
    if request.base_model is not None:
        validate_base_model(request.base_model, limits)
    if request.optimizer and request.optimizer_config is not None:
        raise UserError(
            "optimizer_config is set, expected none: optimizer=true restores the checkpoint's own"
        )
    return CreateViaLoadBody(
        path=str(paths.parse(request.path)),
        optimizer=request.optimizer,
        base_model=request.base_model,
        optimizer_config=validate_optimizer_config(request.optimizer_config),
    )


def _refuse_token(token: str | None) -> None:
    if token is not None:
        raise NotSupportedError(
            "weights_access_token is set: loading other accounts' checkpoints is not built yet"
        )
