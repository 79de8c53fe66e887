"""State of one rank that outlives it: a second copy of every model's tensors, in files.

A unit of work never touches a file that counts. What it changed goes to files of its own, and those before
are free when the next unit begins: by then the engine has entered this one in its ledger. So a process may
die anywhere, and a unit that some ranks had finished is undone by forgetting it.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.training.memory.state_files import StateFiles
from skyrl_tinker.training.models.full_parameter import FullModel
from skyrl_tinker.training.models.trainable_model import Part, TrainableModel
from skyrl_tinker.training.state_ledger import Changes, ModelShare
from skyrl_tinker.training.trainer_spec import TrainerSpec

_log = logging.getLogger(__name__)


class StateMirror:
    """Mirror of all models; between `begin` and `finish`, `keep` and `drop` record the changes of a unit.

    Without a state_dir nothing is kept.
    """

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        self._on_gpu = spec.device == "cuda"
        self._rank = rank
        self._files = (
            StateFiles(Path(spec.state_dir), f"rank{rank}", pinned=self._on_gpu) if spec.state_dir else None
        )
        self._kept: dict[ModelKey, ModelShare] = {}
        self._changes: dict[ModelKey, ModelShare | None] = {}
        self._refused: set[ModelKey] = set()

    def begin(self) -> None:
        """Begin a unit, after the previous one was entered or changed nothing."""
        self._changes = {}
        if self._files is not None:
            self._files.free_all_but({name for kept in self._kept.values() for name in _names(kept)})

    def keep(self, key: ModelKey, model: TrainableModel, changed: Iterable[Part] = ()) -> None:
        """Keep the model as it is now; `changed`: its parts that changed. A fresh one needs no file."""
        if self._files is None:
            return
        before = self._changes.get(key) or self._kept.get(key)
        if before is None:
            files = self._written(key, model, {}, changed)
        elif before.files is None:  # there may be room now
            files = self._written(key, model, {}, model.parts)
        else:
            files = self._written(key, model, before.files, changed)
        self._changes[key] = ModelShare(model.spec, model.optimizer, model.step, files)

    def drop(self, key: ModelKey) -> None:
        if key in self._kept or key in self._changes:
            self._changes[key] = None
            self._refused.discard(key)

    def finish(self) -> Changes:
        """Finish the unit; its changes are in the files when this returns."""
        if self._changes and self._on_gpu:
            torch.cuda.synchronize()
        self._kept = {key: kept for key, kept in (self._kept | self._changes).items() if kept is not None}
        return self._changes

    def open(self, shares: Mapping[ModelKey, Sequence[ModelShare]]) -> None:
        """Adopt the files of the process before this one. `shares`: of each model, those of all ranks."""
        self._kept = {key: each[self._rank] for key, each in shares.items()}
        if self._files is not None:
            self._files.adopt({name for kept in self._kept.values() for name in _names(kept)})

    def fill(self, model: TrainableModel, shares: Sequence[ModelShare]) -> None:
        """Restore a fresh model. The first rank has what is the same on all of them."""
        assert self._files is not None, "it was kept"
        model.step = shares[self._rank].step
        for name, file in {**(shares[0].files or {}), **(shares[self._rank].files or {})}.items():
            part = Part(name)
            if part is Part.GRADIENT:
                model.make_gradients()
            self._files.read(file, model.local(part))

    def _written(
        self, key: ModelKey, model: TrainableModel, files: Mapping[str, str], changed: Iterable[Part]
    ) -> dict[str, str] | None:
        """Return `files` after the change; None: they cannot be written."""
        if isinstance(model, FullModel) and self._on_gpu:  # copying all of it took longer than the pass
            return None
        written = dict(files)
        try:
            for part in filter(lambda part: self._is_ours(model, part), changed):
                written.pop(part, None)
                if model.has_values(part):
                    written[part.value] = self._write(model, part)
        except OSError as error:
            self._refuse(key, error)
            return None
        return written

    def _is_ours(self, model: TrainableModel, part: Part) -> bool:
        """Decide whether this rank writes: adapters differ between ranks only in their gradients."""
        return self._rank == 0 or part is Part.GRADIENT or isinstance(model, FullModel)

    def _write(self, model: TrainableModel, part: Part) -> str:
        assert self._files is not None
        return self._files.write(model.local(part))

    def _refuse(self, key: ModelKey, error: OSError) -> None:
        if key not in self._refused:
            self._refused.add(key)
            _log.warning(
                "model %s would be lost if this process died: no room to keep it (%s)", key, error.strerror
            )


def _names(kept: ModelShare) -> Iterable[str]:
    return (kept.files or {}).values()
