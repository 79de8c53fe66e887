"""Traits of paths, by which layers treat a request before it is routed."""

from collections.abc import Mapping
from enum import Flag, auto

from starlette.types import Scope


class Trait(Flag):
    NONE = 0
    OPEN = auto()  # read without a key
    WAITING = auto()  # a poll, or sent by SDK or dashboard by itself: of a small body, counted by no rate
    NEW_WORK = auto()  # takes room on the disk
    TRAINING = auto()  # has a seq_id, which later requests of its model wait for
    NUMBERED = auto()  # consumes it even when the body is refused
    RELAYED = auto()  # its body is held until samplers have answered, perhaps until they have started


METRICS = "/metrics"
_STEP = Trait.NEW_WORK | Trait.TRAINING
TRAITS: Mapping[str, Trait] = {
    **dict.fromkeys(("/", "/healthz", "/readyz", METRICS, "/docs", "/dashboard"), Trait.OPEN),
    "/api/unauthed/auth-config": Trait.OPEN,
    "/oai/api/v1/completions": Trait.RELAYED,
    "/oai/api/v1/chat/completions": Trait.RELAYED,
    **{
        f"/api/v1/{name}": trait
        for name, trait in {
            "healthz": Trait.OPEN,
            "openapi.json": Trait.OPEN,
            "client/config": Trait.WAITING,
            "client/dynamic_config": Trait.WAITING,
            "session_heartbeat": Trait.WAITING,
            "retrieve_future": Trait.WAITING,
            "retrieve_futures": Trait.WAITING,
            "console/now": Trait.WAITING,
            "create_session": Trait.NEW_WORK,
            "create_model": Trait.NEW_WORK,
            "create_sampling_session": Trait.NEW_WORK,
            "create_custom_loss": Trait.NEW_WORK,
            "copy_weights": Trait.NEW_WORK,
            "asample": Trait.NEW_WORK,
            "forward_backward": _STEP | Trait.NUMBERED,
            "forward": _STEP,
            "optim_step": _STEP,
            "save_weights": _STEP,
            "save_weights_for_sampler": _STEP,
            "save_weights_external": _STEP,
            "load_weights": _STEP,
            "auth/token": Trait.NONE,
            "auth/apikey": Trait.NONE,
            "telemetry": Trait.NONE,
            "sessions/search": Trait.NONE,
            "join_sampling_session": Trait.NONE,
            "get_info": Trait.NONE,
            "weights_info": Trait.NONE,
            "external_weights_upload_start": Trait.NONE,
            "external_weights_upload_finish": Trait.NONE,
            "unload_model": Trait.NONE,
            "cancel_future": Trait.NONE,
            "console/admin/keys": Trait.NONE,
            "console/admin/bases": Trait.NONE,
        }.items()
    },
}
"""Every path without parameters that is posted to, and those of other paths that have a trait."""
_PATHS = {
    trait.value: frozenset(path for path, traits in TRAITS.items() if trait in traits) for trait in Trait
}  # by number: a Flag compares and hashes itself, and finds its `value`, in Python, six times a request


def has(scope: Scope, trait: Trait) -> bool:
    """Return whether a scope is of a request to a path of this trait."""
    if scope["type"] != "http":
        return False
    path = scope["path"].removesuffix("\n")  # which the router's patterns overlook: they end with `$`
    return path in _PATHS[trait._value_]
