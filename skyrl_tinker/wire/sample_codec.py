"""The stored form of an asample request: canonical JSON."""

import orjson

from skyrl_tinker.wire.values import SampleRequest, SamplingParams


def sample_body(request: SampleRequest) -> bytes:
    """Equal requests give equal bytes; wire.codec.digest of them is the dedupe digest."""
    return orjson.dumps(request)


def sample_from_body(body: bytes) -> SampleRequest:
    value = orjson.loads(body)
    params = value.pop("params")
    stop = params.pop("stop")
    return SampleRequest(
        prompt=tuple(value.pop("prompt")),
        params=SamplingParams(stop=None if stop is None else tuple(stop), **params),
        **value,
    )
