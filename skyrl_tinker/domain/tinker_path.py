"""tinker:// paths: `tinker://<model_id>/<weights|sampler_weights|external_weights>/<name>`."""

import re
from dataclasses import dataclass

from skyrl_tinker.domain.ids import CheckpointKind, ModelId
from skyrl_tinker.errors import UserError

SCHEME = "tinker://"
_FORMAT = f"tinker://<training run>/<{'|'.join(CheckpointKind)}>/<name>"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TinkerPath:
    model_id: ModelId
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """`<kind>/<name>`, as in REST routes."""
        return f"{self.kind}/{self.name}"


def parse(text: str) -> TinkerPath:
    """Read a tinker:// path. Raises UserError that names the format."""
    run, slash, checkpoint = text.removeprefix(SCHEME).partition("/")
    if not text.startswith(SCHEME) or not run or not slash or "\0" in run:
        raise UserError(f"{text!r} is not a checkpoint path: expected {_FORMAT}")
    return parse_checkpoint_id(ModelId(run), checkpoint)


def parse_checkpoint_id(model_id: ModelId, checkpoint_id: str) -> TinkerPath:
    """Read `<kind>/<name>`. Raises UserError that names the format."""
    kind, _, name = checkpoint_id.partition("/")
    if kind not in tuple(CheckpointKind):
        raise UserError(f"{checkpoint_id!r} is not a checkpoint of {model_id}: expected {_FORMAT}")
    return TinkerPath(model_id, CheckpointKind(kind), validate_checkpoint_name(name))


def validate_checkpoint_name(name: str) -> str:
    """Return the name, or raise UserError: names become parts of paths that users type and share."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"checkpoint name is {name!r}, expected a letter or digit, "
            "then up to 127 letters, digits, '.', '_' or '-'"
        )
    return name
