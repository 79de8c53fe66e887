"""Model state that outlives the ranks' processes, and its files. Plain data, free of torch.

Ranks write what a unit of work changed into fresh files before they answer. The engine enters them here when
all ranks have answered: until then, and for any rank that dies before, the files of the previous unit are
valid. So a unit is done on all ranks or on none, without messages between them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec, OptimizerFamily

GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class ModelShare:
    """One rank's share of a model.

    `files`: in `TrainerSpec.state_dir`, by part; a part without a file is what it is in a fresh model. None:
    there was no room, the model dies with its process.
    """

    spec: LoraSpec
    optimizer: OptimizerFamily
    step: int
    files: Mapping[str, str] | None


Changes = Mapping[ModelKey, ModelShare | None]
"""Changes by one unit of work, on one rank; None: released."""


class StateLedger:
    """Shares of all ranks of every model, after the last unit that all ranks finished."""

    def __init__(self) -> None:
        self._shares: dict[ModelKey, tuple[ModelShare, ...]] = {}

    @property
    def shares(self) -> Mapping[ModelKey, Sequence[ModelShare]]:
        """Shares of each model, by rank."""
        return self._shares

    def record(self, changes: Sequence[Changes]) -> None:
        """Record a unit's changes, by rank; all ranks change the same models."""
        for model in changes[0]:
            shares = tuple(kept for each in changes if (kept := each[model]) is not None)
            if shares:
                self._shares[model] = shares
            else:
                self.drop(model)

    def drop(self, model: ModelKey) -> None:
        self._shares.pop(model, None)

    def drop_gradients(self, models: Iterable[ModelKey]) -> None:
        for model in models:
            if model in self._shares:
                self._shares[model] = tuple(map(_without_gradients, self._shares[model]))

    def drop_lost(self) -> set[ModelKey]:
        """Forget the models that are not kept on every rank; returns them."""
        lost = {key for key, shares in self._shares.items() if any(kept.files is None for kept in shares)}
        for model in lost:
            self.drop(model)
        return lost


def _without_gradients(kept: ModelShare) -> ModelShare:
    if kept.files is None:
        return kept
    return replace(kept, files={part: file for part, file in kept.files.items() if part != GRADIENT})
