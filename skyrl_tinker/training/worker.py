"""One rank of the trainer. A plain class: Ray makes an actor of it, tests use it as it is."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from skyrl_tinker.errors import StateLostError, TrainerError, UserError
from skyrl_tinker.training import checkpoint, distributed, memory
from skyrl_tinker.training.batch import TrainingInputBatch
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.full import FullModel, create_full
from skyrl_tinker.training.lora import LoraModel
from skyrl_tinker.training.model import frozen_network
from skyrl_tinker.training.optim import optim_step
from skyrl_tinker.training.outputs import RankOutput
from skyrl_tinker.training.passes import PassRunner
from skyrl_tinker.training.spec import TrainerSpec
from skyrl_tinker.training.state import Part, TrainableModel
from skyrl_tinker.wire.ids import ModelKey
from skyrl_tinker.wire.values import AdapterWeights, LoraSpec, StepItem, StepOutput


class Worker:
    """All ranks get the same calls in the same order; each call but `capture_adapter` may be a collective."""

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        torch.set_num_threads(spec.threads)
        memory.keep_freed()
        self.spec = spec
        self.rank = rank
        self._models: dict[ModelKey, TrainableModel] = {}
        self._store: TCPStore | None = None

    def open_store(self) -> int:
        """Rank 0 only: open the rendezvous; returns its port."""
        self._store = store = distributed.open_store(self.spec.timeout_s)
        return int(store.port)

    def join(self, port: int) -> None:
        timeout = self.spec.timeout_s
        store = self._store or distributed.connect_store(port, timeout)
        self.attach(distributed.join(store, self.rank, self.spec.ranks, self.spec.device, timeout))

    def attach(self, ranks: Ranks) -> None:
        """Load the base model, sharded over `ranks`."""
        self._ranks = ranks
        self._base = frozen_network(self.spec.directory, self.spec.dtype, ranks.mesh)
        self._runner = PassRunner(self._base, self._models, ranks, self.spec.token_budget)

    def create_model(self, key: ModelKey, spec: LoraSpec) -> None:
        if key in self._models:
            raise TrainerError(f"model {key} exists already")
        if spec.rank == 0:
            self._models[key] = create_full(key, spec, self.spec, self._base, self._ranks)
        else:
            self._models[key] = LoraModel(spec, self._base.targets, self._ranks.device)

    def run_pass(self, batch: TrainingInputBatch) -> RankOutput:
        return self._runner.run(batch)

    def optim_step(self, steps: Sequence[StepItem]) -> list[StepOutput]:
        models = [self._model(item.model) for item in steps]  # none steps if one is lost
        return [optim_step(model, item, self._ranks) for model, item in zip(models, steps, strict=True)]

    def zero_gradients(self, models: Sequence[ModelKey]) -> None:
        for key in models:
            self._model(key).clear_gradients()

    def capture_adapter(self, key: ModelKey) -> AdapterWeights:
        model = self._model(key)
        if not isinstance(model, LoraModel):
            raise UserError(f"model {key} trains full parameters: it has no adapter")
        tensors = {name: model.read(Part.WEIGHT, name).cpu().numpy().copy() for name in model.shapes()}
        return AdapterWeights(model.spec, tensors)

    def capture_full(self, key: ModelKey, directory: str) -> None:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        checkpoint.write_weights(self._model(key), Path(directory), dtype, writer=self.rank == 0)

    def save_state(self, key: ModelKey, directory: str, optimizer: bool) -> int:
        model, target = self._model(key), Path(directory)
        return checkpoint.save(model, target, self.spec.directory, optimizer=optimizer, ranks=self._ranks)

    def load_state(self, key: ModelKey, directory: str, optimizer: bool) -> None:
        checkpoint.load(self._model(key), Path(directory), optimizer=optimizer)

    def release(self, key: ModelKey) -> None:
        """Idempotent. A full-parameter copy's memory is free again when this returns."""
        if isinstance(self._models.pop(key, None), FullModel):
            memory.give_back()

    def _model(self, key: ModelKey) -> TrainableModel:
        try:
            return self._models[key]
        except KeyError:
            raise StateLostError(f"the trainer has no state of model {key}") from None
