"""Stored forms of samples, and of training requests other than forward_backward: canonical JSON."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import orjson
from pydantic import TypeAdapter

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.samples import SampleRequest
from skyrl_tinker.domain.values import AdamParams, DimuonParams

_NOT_COMPARED = ("type", "sampling_session_seq_id")
_SAMPLE = TypeAdapter(SampleRequest)
_PARAMS = {params.family: params for params in (AdamParams, DimuonParams)}


@dataclass(frozen=True, slots=True)
class _StoredBody:
    def to_bytes(self) -> bytes:
        return orjson.dumps(self, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def from_bytes(cls, body: bytes) -> Self:
        return cls(**orjson.loads(body))


@dataclass(frozen=True, slots=True)
class OptimStepBody(_StoredBody):
    params: AdamParams | DimuonParams

    def to_bytes(self) -> bytes:
        return orjson.dumps({self.params.family: self.params}, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def from_bytes(cls, body: bytes) -> Self:
        ((family, params),) = orjson.loads(body).items()
        return cls(_PARAMS[family](**params))


@dataclass(frozen=True, slots=True)
class SaveWeightsBody(_StoredBody):
    name: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveExternalBody(_StoredBody):
    """Save for download. `recipients`: age keys that every file is encrypted to; none: unencrypted."""

    name: str
    ttl_seconds: int | None = None
    recipients: Sequence[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SaveSamplerBody(_StoredBody):
    """Save for the samplers: durable with a `name`, else ephemeral with a `sampling_session_seq_id`.

    `kind` inflight (ephemeral only): sessions of the model's earlier inflight saves use the new weights too.
    """

    name: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadWeightsBody(_StoredBody):
    """Load into an existing model."""

    path: str
    optimizer: bool


@dataclass(frozen=True, slots=True)
class CreateModelBody(_StoredBody):
    """Empty: the model's row holds its parameters."""


@dataclass(frozen=True, slots=True)
class CreateViaLoadBody(_StoredBody):
    """Create from a checkpoint, with its optimizer (`optimizer`) or a new one of `optimizer_config`."""

    path: str
    optimizer: bool
    base_model: str | None
    optimizer_config: Mapping[str, Any]


def payload_digest(kind: RequestKind, payload: Mapping[str, Any]) -> bytes:
    """Return the dedupe digest of a JSON request, valid or not. Null equals absent.

    Left out are `type`, and `sampling_session_seq_id`, which changes when an ephemeral save is retried.
    """
    compared = {
        key: value for key, value in payload.items() if value is not None and key not in _NOT_COMPARED
    }
    try:
        canonical = orjson.dumps([kind, compared], option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # an integer of more than 64 bits
        canonical = json.dumps([kind, compared], sort_keys=True).encode()
    return hashlib.sha256(canonical).digest()


def body_digest(body: bytes) -> bytes:
    """Return the dedupe digest of a stored body: canonical bytes of a pass, or those of `sample_body`.

    Every other kind uses `payload_digest`.
    """
    return hashlib.sha256(body).digest()


def sample_body(request: SampleRequest) -> bytes:
    """Return the stored form of a sample; equal requests give equal bytes."""
    return orjson.dumps(request)


def sample_from_body(body: bytes) -> SampleRequest:
    return _SAMPLE.validate_json(body)
