"""Names that settings had before."""

from collections.abc import Mapping

from skyrl_tinker.config.setting_tables import EphemeralWeights, Phases, Recovery
from skyrl_tinker.protocol.schemas.session import SdkFlags
from skyrl_tinker.protocol.validation.key_limits import KeyLimits

_FIXED = (
    "fwdbwd_dispatch_bytes_semaphore_size",
    "fwdbwd_max_chunk_len",
    "inflight_response_bytes_semaphore_size",
    "sample_dispatch_bytes_semaphore_size",
    "sample_max_concurrent_requests",
)
"""Flags of the SDK that every server gives the same value."""
FORMER: Mapping[str, str | None] = {
    **dict.fromkeys((*_FIXED, *(f"sdk.{name}" for name in _FIXED))),
    **{f"key_{name}": f"keys.{name}" for name in KeyLimits.model_fields},
    **{f"ephemeral_{name}": f"ephemeral.{name}" for name in EphemeralWeights.model_fields},
    **{f"phase_{name}": f"phases.{name}" for name in Phases.model_fields},
    **{name: f"recovery.{name}" for name in Recovery.model_fields},
    **{name: f"sdk.{name}" for name in SdkFlags.model_fields},
    "bodies.datums": None,
    "canary": "parity.canary",
    "expanded_body_mb": "bodies.expanded_mb",
    "gap_deadline_s": None,
    "gap_probe_tokens": "parity.probe_tokens",
    "held_bodies_mb": "bodies.held_mb",
    "history_ttl_s": "retention.history_s",
    "json_body_mb": "bodies.json_mb",
    "log_mb": None,
    "logprob_gap_bound": "parity.gap_bound",
    "long_poll_s": "timeouts.long_poll_s",
    "max_connections": "connections.total",
    "max_connections_per_address": "connections.per_address",
    "max_datums": None,
    "request_deadline_s": "timeouts.request_s",
    "result_ttl_s": "retention.results_s",
    "retention.stability_s": "retention.results_s",
    "router_policy": None,
    "sampler_hang_s": None,
    "sampler_startup_s": None,
    "sampler_step_s": None,
    "session_timeout_s": "timeouts.session_s",
    "stability_ttl_s": "retention.results_s",
    "timeouts.gap_s": None,
    "trainer_memory_gb": None,
    "trainer_threads": None,
    "unit_ms": None,
    "unit_tokens": None,
    "weight_chunk_mb": None,
    "wire_body_mb": "bodies.wire_mb",
}
"""Former names of settings with the present ones, None where there is none."""


def successor(name: str) -> str:
    """Return the remedy for a name that was a setting, "" for any other."""
    if (new := FORMER.get(name)) is None:
        return "no setting any more" if name in FORMER else ""
    table, _, key = new.partition(".")
    return f"now {new} (--{table} {key}=…, [{table}] in a file)"
