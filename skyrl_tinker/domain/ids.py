"""Identifiers and closed sets that every layer shares."""

from enum import Enum, StrEnum
from typing import Literal, NewType

OwnerId = NewType("OwnerId", int)
"""The store's key of an API key (`api_keys.id`); only its holder sees the work done with it. A server without
keys has one owner, None."""


class _Everyone(Enum):
    ALL_OWNERS = "all owners"


ALL_OWNERS: Literal[_Everyone.ALL_OWNERS] = _Everyone.ALL_OWNERS
Reach = OwnerId | Literal[_Everyone.ALL_OWNERS] | None
"""Owners whose work a caller sees: one, or for an admin key all. None is the one owner without a key."""
SessionId = NewType("SessionId", str)
ModelId = NewType("ModelId", str)
"""`<session_id>:train:<model_seq_id>`; equals the training run id."""
SamplingSessionId = NewType("SamplingSessionId", str)
RequestId = NewType("RequestId", str)
SeqId = NewType("SeqId", int)
ModelKey = NewType("ModelKey", int)
"""The store's own integer key of a model: names directories, adapters and worker state, never client text."""
VersionId = NewType("VersionId", int)
"""The store's key of one immutable set of sampler weights (`adapter_versions.id`)."""


_OPENAI = "openai-"


def openai_session(owner: OwnerId | None) -> SessionId:
    """Return the session that an owner's requests by OpenAI's protocol count as."""
    return SessionId(f"{_OPENAI}{owner or 0}")


def is_openai(session: str) -> bool:
    """Return whether `openai_session` made it."""
    return session.startswith(_OPENAI)


def owner_of_openai(session: SessionId) -> OwnerId | None:
    """Return the owner of a session that `openai_session` made."""
    return OwnerId(int(session.removeprefix(_OPENAI))) or None


def sequence_ids(request: RequestId, count: int) -> tuple[str, ...]:
    """Return the ids of the sequences that a sample request generates, in order."""
    return tuple(f"{request}-{index}" for index in range(count))


def request_of(sequence_id: str) -> RequestId:
    """Return the sample request of a sequence id; for any other text an id that no request has."""
    return RequestId(sequence_id.rpartition("-")[0])


class RequestKind(StrEnum):
    CREATE_MODEL = "create_model"
    LOAD_WEIGHTS = "load_weights"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_WEIGHTS_EXTERNAL = "save_weights_external"
    COPY_WEIGHTS = "copy_weights"
    UNLOAD_MODEL = "unload_model"
    SAMPLE = "sample"
    CANCEL_SAMPLE = "cancel_sample"
    CREATE_CUSTOM_LOSS = "create_custom_loss"
    MISSING = "missing"  # a seq_id that no request came for


SAVES = frozenset(
    {RequestKind.SAVE_WEIGHTS, RequestKind.SAVE_WEIGHTS_EXTERNAL, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER}
)


class FutureStatus(StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Effect(StrEnum):
    """Effect of a training request on its model's state; those without any have none."""

    GRADIENTS = "gradients"  # added to
    STEP = "step"  # an optimizer step was taken
    CLEARED = "cleared"  # the gradients were dropped, by a step that was refused
    LOADED = "loaded"  # a checkpoint replaced everything


class ModelState(StrEnum):
    CREATING = "creating"
    READY = "ready"
    PARKED = "parked"  # not on the ranks, with all that brings it back; another start may
    FAILED = "failed"
    LOST = "lost"  # by a database's update (0007)
    RELEASED = "released"


class CheckpointKind(StrEnum):
    """The middle segment of a tinker:// path."""

    WEIGHTS = "weights"
    SAMPLER_WEIGHTS = "sampler_weights"
    EXTERNAL_WEIGHTS = "external_weights"
