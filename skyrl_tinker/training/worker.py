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
from skyrl_tinker.training.offload import Aside, network_tensors
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
        self._asides: dict[ModelKey | None, Aside] = {None: Aside()}  # None: the base
        self._offloaded = False
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
        self._require_onloaded()
        if key in self._models:
            raise TrainerError(f"model {key} exists already")
        if spec.rank == 0:
            self._models[key] = create_full(key, spec, self.spec, self._base, self._ranks)
        else:
            self._models[key] = LoraModel(spec, self._base.targets, self._ranks.device)
        self._asides[key] = Aside()

    def run_pass(self, batch: TrainingInputBatch) -> RankOutput:
        self._require_onloaded()
        for info in batch.requests:
            if info.backward and info.model in self._asides:
                self._asides[info.model].forget()
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
        # Copies: a storage that NumPy has seen cannot be set aside any more.
        copies = {name: model.read(Part.WEIGHT, name).to("cpu", copy=True) for name in model.shapes()}
        return AdapterWeights(model.spec, {name: tensor.numpy() for name, tensor in copies.items()})

    def capture_full(self, key: ModelKey, directory: str) -> None:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        checkpoint.write_weights(self._model(key), Path(directory), dtype, writer=self.rank == 0)

    def save_state(self, key: ModelKey, directory: str, optimizer: bool) -> int:
        model, target = self._model(key), Path(directory)
        return checkpoint.save(model, target, self.spec.directory, optimizer=optimizer, ranks=self._ranks)

    def load_state(self, key: ModelKey, directory: str, optimizer: bool) -> None:
        checkpoint.load(self._model(key), Path(directory), optimizer=optimizer)

    def release(self, key: ModelKey) -> None:
        """Idempotent, also while offloaded. A full-parameter copy's memory is free when this returns."""
        self._asides.pop(key, None)
        if isinstance(self._models.pop(key, None), FullModel):
            memory.give_back()

    def offload(self) -> None:
        """Set all state aside on the host and give the device's memory back. Nothing to do the second time.

        Only what changed since the last time is copied: never the frozen base, nor tenants without work.
        """
        if self._offloaded:
            return
        self._asides[None].offload(network_tensors(self._base))
        for key, model in self._models.items():
            self._asides[key].offload(model.tensors())
        self._offloaded = True
        memory.uncache()

    def onload(self) -> None:
        """Bring all state back, to the last bit. Nothing to do the second time."""
        if self._offloaded:
            for aside in self._asides.values():
                aside.onload()
            self._offloaded = False

    def _require_onloaded(self) -> None:
        if self._offloaded:
            raise TrainerError("the trainer's state is set aside: call onload first")

    def _model(self, key: ModelKey) -> TrainableModel:
        """To work with: what the host has of it counts as old."""
        self._require_onloaded()
        if key not in self._models:
            raise StateLostError(f"the trainer has no state of model {key}")
        self._asides[key].forget()
        return self._models[key]
