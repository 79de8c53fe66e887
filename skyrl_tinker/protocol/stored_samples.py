"""The stored form of an asample request: canonical JSON."""

from typing import Any

import orjson

from skyrl_tinker.domain.values import SampleRequest, SamplingParams, TargetTokens


def sample_body(request: SampleRequest) -> bytes:
    """Equal requests give equal bytes; wire.codec.digest of them is the dedupe digest."""
    return orjson.dumps(request)


def sample_from_body(body: bytes) -> SampleRequest:
    value = orjson.loads(body)
    params = value.pop("params")
    targets = value.pop("target_prompt_logprobs")
    return SampleRequest(
        prompt=tuple(value.pop("prompt")),
        params=SamplingParams(stop=_tuple(params.pop("stop")), **params),
        target_prompt_logprobs=None if targets is None else _targets(targets),
        **value,
    )


def _targets(value: dict[str, Any]) -> TargetTokens:
    return TargetTokens(
        (value["shape"][0], value["shape"][1]),
        tuple(value["tokens"]),
        _tuple(value["crow"]),
        _tuple(value["col"]),
    )


def _tuple(items: list[Any] | None) -> tuple[Any, ...] | None:
    return None if items is None else tuple(items)
