"""`kind: inflight`: weights that move under the sampling clients of a model."""

from dataclasses import dataclass

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import WeightVersion


@dataclass(eq=False)
class InflightTarget:
    """What all inflight sampling clients of one model share. `version` only ever moves on."""

    model: ModelKey
    version: WeightVersion

    @property
    def tag(self) -> str:
        """Under which its running requests are known to the inference client."""
        return f"m{self.model}"


Wanted = WeightVersion | InflightTarget | None
"""What a sampling client samples from; None: the base model."""


def newest(wanted: WeightVersion | InflightTarget) -> WeightVersion:
    """What it stands for now."""
    return wanted.version if isinstance(wanted, InflightTarget) else wanted


class InflightTargets:
    """One target per model, until its last version is dropped."""

    def __init__(self) -> None:
        self._targets: dict[ModelKey, InflightTarget] = {}

    def at_least(self, model: ModelKey, version: WeightVersion) -> InflightTarget:
        """The target of this model, moved on to `version` unless it is newer: publications may overtake
        each other."""
        target = self._targets.get(model)
        if target is None:
            target = self._targets[model] = InflightTarget(model, version)
        elif target.version.id < version.id:
            target.version = version
        return target

    def drop(self, version: WeightVersion) -> None:
        """Nobody samples it any more: nor the target, where it has moved no further."""
        for target in [each for each in self._targets.values() if each.version == version]:
            del self._targets[target.model]
