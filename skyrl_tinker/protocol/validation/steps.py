"""Optimizer steps, saves and loads."""

import sys
from collections.abc import Mapping
from typing import Any, Literal

from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.values import AdamParams, DimuonParams
from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.protocol import age_encryption
from skyrl_tinker.protocol.schemas.base import shorten
from skyrl_tinker.protocol.schemas.training import (
    CreateViaLoadRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveExternalRequest,
    SaveSamplerRequest,
    SaveWeightsRequest,
)
from skyrl_tinker.protocol.stored_requests import (
    CreateViaLoadBody,
    LoadWeightsBody,
    OptimStepBody,
    SaveExternalBody,
    SaveSamplerBody,
    SaveWeightsBody,
)
from skyrl_tinker.protocol.validation.models import validate_optimizer_config

_MOST = sys.float_info.max
_MOST_FLOAT32 = 3.4028234663852886e38
"""Weights and moments are float32, where larger values are infinite."""
_LEAST_EPS = 1e-37
"""Smaller values are 0 in float32, and a weight without a gradient (A of a new adapter) becomes 0 / 0."""
_TTL = (3600, 10 * 365 * 86400)  # one hour to ten years
_Ranges = Mapping[str, tuple[float, float]]
"""Key: lowest, highest (excluded)."""

_ADAM: _Ranges = {
    "learning_rate": (0.0, _MOST_FLOAT32),
    "beta1": (0.0, 1.0),
    "beta2": (0.0, 1.0),
    "eps": (_LEAST_EPS, _MOST_FLOAT32),
    "weight_decay": (0.0, _MOST_FLOAT32),
    "grad_clip_norm": (0.0, _MOST),
}
_DIMUON: _Ranges = {
    "learning_rate": (0.0, _MOST_FLOAT32),
    "beta1": (0.0, 1.0),
    "grad_clip_norm": (-_MOST, _MOST),
}


def validate_optim_step(request: OptimStepRequest) -> OptimStepBody:
    """Return the checked step. The workers check that the model has this optimizer."""
    return OptimStepBody(validate_step_params(request.adam_params, request.optimizer_params))


def validate_step_params(
    adam_params: Mapping[str, Any] | None, optimizer_params: Mapping[str, Any] | None
) -> AdamParams | DimuonParams:
    """Return the parameters; absent keys get the protocol's defaults (SDKs up to 0.16 send only set ones)."""
    if adam_params is not None and optimizer_params is not None:
        raise UserError("adam_params and optimizer_params are both set, expected exactly one of them")
    if adam_params is not None:
        if adam_params.get("type") not in (None, AdamParams.family):
            raise UserError(f"adam_params.type is {shorten(adam_params['type'])}, expected 'adamw' or none")
        return AdamParams(**_numbers("adam_params", adam_params, _ADAM))
    if optimizer_params is None:
        raise UserError("adam_params and optimizer_params are both missing, expected exactly one of them")
    family = optimizer_params.get("type")
    if family != DimuonParams.family:
        raise NotSupportedError(
            f"optimizer_params.type is {shorten(family)}, "
            "expected 'dimuon' (parameters of adamw go in adam_params)"
        )
    params = _numbers("optimizer_params", optimizer_params, _DIMUON)
    if "learning_rate" not in params:
        raise UserError("optimizer_params.learning_rate is missing")
    return DimuonParams(**params)


def _numbers(field: str, values: Mapping[str, Any], ranges: _Ranges) -> dict[str, float]:
    unknown = sorted(set(values) - {*ranges, "type"})
    if unknown:
        raise UserError(f"{field} has the unknown key {shorten(unknown[0])}, expected {', '.join(ranges)}")
    return {
        key: _number(f"{field}.{key}", values[key], *bounds)
        for key, bounds in ranges.items()
        if key in values
    }


def _number(field: str, value: Any, low: float, high: float) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value < high:
        shown = "null (which is how the SDK sends nan and inf)" if value is None else shorten(value)
        raise UserError(f"{field} is {shown}, expected {_expected(low, high)}")
    return float(value)


def _expected(low: float, high: float) -> str:
    if high < _MOST_FLOAT32:
        return f"a number in [{low:g}, {high:g})"
    expected = "a finite number" if low == -_MOST else f"a finite number >= {low:g}"
    return expected if high == _MOST else f"{expected} in float32"


def validate_ttl(ttl_seconds: int | None) -> int | None:
    """Return the time to live; None means unlimited."""
    if ttl_seconds is not None and not _TTL[0] <= ttl_seconds <= _TTL[1]:
        raise UserError(f"ttl_seconds is {ttl_seconds}, expected {_TTL[0]} (1 hour) to {_TTL[1]} (10 years)")
    return ttl_seconds


def validate_save_weights(request: SaveWeightsRequest) -> SaveWeightsBody:
    return SaveWeightsBody(
        name=tinker_path.validate_checkpoint_name(request.path),
        ttl_seconds=validate_ttl(request.ttl_seconds),
        overwrite=request.overwrite,
        user_metadata=request.user_metadata or {},
    )


def validate_save_external(request: SaveExternalRequest) -> SaveExternalBody:
    recipients = request.age_encryption_recipients
    if recipients is not None:
        age_encryption.check_recipients(recipients)
    return SaveExternalBody(
        name=tinker_path.validate_checkpoint_name(request.path),
        ttl_seconds=validate_ttl(request.ttl_seconds),
        recipients=recipients or [],
    )


def validate_save_sampler(request: SaveSamplerRequest) -> SaveSamplerBody:
    """Return the checked save: named or ephemeral, never both; only an ephemeral one can be inflight."""
    if (request.path is None) == (request.sampling_session_seq_id is None):
        raise UserError(
            "expected exactly one of path (a named save) and sampling_session_seq_id (an ephemeral one)"
        )
    return SaveSamplerBody(
        name=None if request.path is None else tinker_path.validate_checkpoint_name(request.path),
        sampling_session_seq_id=request.sampling_session_seq_id,
        kind=_save_kind(request),
        ttl_seconds=validate_ttl(request.ttl_seconds),
        user_metadata=request.user_metadata or {},
    )


def _save_kind(request: SaveSamplerRequest) -> Literal["snapshot", "inflight"]:
    if request.kind == "snapshot":
        return "snapshot"
    if request.kind != "inflight":
        raise UserError(f"kind is {shorten(request.kind)}, expected 'snapshot' or 'inflight'")
    if request.path is not None:
        raise UserError("kind is 'inflight', expected 'snapshot': a named save never changes")
    if request.ttl_seconds is not None:
        raise UserError(
            f"ttl_seconds is {request.ttl_seconds}, expected none: weights of kind 'inflight' "
            "are deleted once they are superseded"
        )
    return "inflight"


def validate_load_weights(request: LoadWeightsRequest) -> LoadWeightsBody:
    refuse_access_token(request.weights_access_token)
    return LoadWeightsBody(path=str(tinker_path.parse(request.path)), optimizer=request.optimizer)


def validate_create_via_load(request: CreateViaLoadRequest, bases: Bases) -> CreateViaLoadBody:
    """Return the checked load; `optimizer_config` is for one without optimizer state."""
    refuse_access_token(request.weights_access_token)
    if request.base_model is not None:
        bases.require_trainable(request.base_model)
    if request.optimizer and request.optimizer_config is not None:
        raise UserError(
            "optimizer_config is set, expected none: optimizer=true restores the checkpoint's own"
        )
    return CreateViaLoadBody(
        path=str(tinker_path.parse(request.path)),
        optimizer=request.optimizer,
        base_model=request.base_model,
        optimizer_config=validate_optimizer_config(request.optimizer_config),
    )


def refuse_access_token(token: str | None) -> None:
    """Refuse a token with a reason: this server issues none, and "not found" would not explain it."""
    if token is not None:
        raise NotSupportedError(
            "weights_access_token is set, expected none: this server issues no such tokens; "
            "the checkpoint's owner can publish it (`tinker checkpoint publish`)"
        )
