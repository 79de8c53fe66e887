"""One rank of the trainer. A plain class: Ray makes an actor of it, tests use it as it is."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from skyrl_tinker.atomic_directory import storage_errors
from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.manifest import CheckpointContents, FileEntry
from skyrl_tinker.domain.values import AdapterWeights, LoraSpec, OptimizerFamily, StepItem, StepOutput
from skyrl_tinker.errors import StateLostError, TrainerError, UserError
from skyrl_tinker.processes import spare_the_collector
from skyrl_tinker.training import distributed
from skyrl_tinker.training.batching.batch import TrainingInputBatch
from skyrl_tinker.training.batching.outputs import RankOutput
from skyrl_tinker.training.checkpoints import checkpoint_load, checkpoint_save, sampler_export
from skyrl_tinker.training.checkpoints.checkpoint_save import Captured, Layout
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory import allocator, memory_budget
from skyrl_tinker.training.memory.device_cache import DeviceCache
from skyrl_tinker.training.memory.offload import OffloadBuffer
from skyrl_tinker.training.memory.state_mirror import StateMirror
from skyrl_tinker.training.models.full_parameter import FullModel, create_full
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.network import frozen_network, network_tensors, trainable_network
from skyrl_tinker.training.models.trainable_model import Part, TrainableModel
from skyrl_tinker.training.optimizers import optim_step
from skyrl_tinker.training.passes import out_of_memory
from skyrl_tinker.training.passes.out_of_memory import is_out_of_memory
from skyrl_tinker.training.passes.pass_runner import PassRunner
from skyrl_tinker.training.rendezvous import Rendezvous
from skyrl_tinker.training.state_ledger import ModelShare
from skyrl_tinker.training.trainer_spec import TrainerSpec


class Worker:
    """All ranks get the same calls in the same order; each call may be a collective, but not
    `capture_adapter`, nor `persist_state` and `commit_state`, which run beside the others."""

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        torch.set_num_threads(spec.threads)
        allocator.keep_freed()
        self.spec = spec
        self.rank = rank
        self.vault = StateMirror(spec, rank)
        self._models: dict[ModelKey, TrainableModel] = {}
        self._residents = DeviceCache(self._models, spec.resident_models)
        self._base_aside = OffloadBuffer()
        self._captured: dict[int, Captured] = {}
        self._offloaded = False
        self._store: TCPStore | None = None
        self._meeting: Rendezvous | None = None

    def open_store(self) -> int:
        """Rank 0 only: open the rendezvous; returns its port."""
        self._store = store = distributed.open_store(self.spec.timeout_s)
        return int(store.port)

    def join(self, port: int) -> None:
        store = self._store or distributed.connect_store(port, self.spec.timeout_s)
        self._meeting = Rendezvous(store, self.rank, self.spec)
        self.attach(self._meeting.join())

    def attach(self, ranks: Ranks) -> None:
        """Load the base model, sharded over `ranks`."""
        self._ranks = ranks
        self._base = frozen_network(self.spec, ranks.mesh)
        self._runner = PassRunner(self._base, self._models, ranks)
        spare_the_collector()

    def create_model(self, key: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily = "adamw") -> None:
        self._require_onloaded()
        if key in self._models:
            raise TrainerError(f"model {key} exists already")
        if spec.rank == 0:
            self._require_room(optimizer)
        self._models[key] = model = self._fresh(key, spec, optimizer)
        self._residents.add(key)
        self.vault.keep(key, model)

    def restore(self, shares: Mapping[ModelKey, Sequence[ModelShare]]) -> None:
        """On a fresh worker: go on where the one before it, and its peers, had finished their last unit."""
        self.vault.open(shares)
        for key, each in shares.items():
            self._models[key] = model = self._fresh(key, each[0].spec, each[0].optimizer)
            self.vault.fill(model, each)
            self._residents.add(key)

    def run_pass(self, batch: TrainingInputBatch, budget: int | None = None) -> RankOutput:
        """`budget`: tokens per row, if not those of the spec."""
        output = self._run_pass(batch, budget or self.spec.token_budget)
        for key in dict.fromkeys(info.model for info in batch.requests if info.backward):
            if key in self._models:
                self.vault.keep(key, self._models[key], (Part.GRADIENT,))
        return output

    def _run_pass(self, batch: TrainingInputBatch, budget: int) -> RankOutput:
        self._require_onloaded()
        self._residents.use(info.model for info in batch.requests)
        self._residents.change(info.model for info in batch.requests if info.backward)
        return out_of_memory.run_pass(
            batch,
            budget,
            lambda tokens: self._runner.run(batch, tokens),
            self._gave_up,
            self._recover,
        )

    def optim_step(self, steps: Sequence[StepItem]) -> list[StepOutput]:
        for item in steps:
            self._require_known(item.model)  # none steps if one is lost
        return [self._optim_step(item) for item in steps]

    def _optim_step(self, item: StepItem) -> StepOutput:
        model = self._model(item.model)
        before = model.step
        output = optim_step(model, item, self._ranks)
        self.vault.keep(item.model, model, model.parts if model.step > before else (Part.GRADIENT,))
        return output

    def zero_gradients(self, models: Sequence[ModelKey]) -> None:
        for key in models:
            model = self._model(key)
            model.clear_gradients()
            self.vault.keep(key, model, (Part.GRADIENT,))

    def capture_adapters(self, keys: Sequence[ModelKey]) -> dict[ModelKey, AdapterWeights]:
        return {key: self.capture_adapter(key) for key in keys}

    def capture_adapter(self, key: ModelKey) -> AdapterWeights:
        model = self._unchanged(key)
        if not isinstance(model, LoraModel):
            raise UserError(f"model {key} trains full parameters: it has no adapter")
        # Copies: a storage that NumPy has seen cannot be set aside any more.
        copies = {name: model.read(Part.WEIGHT, name).to("cpu", copy=True) for name in model.shapes()}
        return AdapterWeights(model.spec, {name: tensor.numpy() for name, tensor in copies.items()})

    def capture_full(self, key: ModelKey, directory: str) -> None:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        sampler_export.write_weights(self._unchanged(key), Path(directory), dtype, writer=self.rank == 0)

    def capture_state(self, key: ModelKey, number: int, optimizer: bool) -> CheckpointContents:
        """Keep host copies of this rank's share under `number` until they are persisted."""
        return self._capture(key, number, optimizer, checkpoint_save.STATE)

    def capture_export(self, key: ModelKey, number: int, shard_bytes: int) -> CheckpointContents:
        """The weights alone, for use elsewhere: an adapter, or all in the trainer's dtype in shards."""
        if isinstance(self._unchanged(key), LoraModel):
            return self._capture(key, number, False, checkpoint_save.STATE)
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return self._capture(key, number, False, Layout(dtype, shard_bytes))

    def _capture(self, key: ModelKey, number: int, optimizer: bool, layout: Layout) -> CheckpointContents:
        self._captured[number] = captured = checkpoint_save.capture(
            self._unchanged(key),
            self.spec.directory,
            optimizer=optimizer,
            rank=self.rank,
            world=self.spec.ranks,
            layout=layout,
        )
        return captured.contents

    def persist_state(self, number: int, scratch: str) -> dict[str, FileEntry]:
        """Write the share captured under `number`, in any thread. Its copies are free when this returns."""
        captured = self._captured.pop(number)
        with storage_errors(f"rank {self.rank} could not write the checkpoint"):
            return checkpoint_save.persist(captured, Path(scratch))

    def commit_state(
        self, contents: CheckpointContents, files: Mapping[str, FileEntry], scratch: str, directory: str
    ) -> int:
        """One rank only, in any thread, after all have persisted. Returns bytes."""
        with storage_errors(f"rank {self.rank} could not write the checkpoint"):
            return checkpoint_save.commit(contents, files, Path(scratch), Path(directory))

    def load_state(self, key: ModelKey, directory: str, optimizer: bool) -> None:
        model = self._model(key)
        checkpoint_load.load(model, Path(directory), optimizer=optimizer, ranks=self._ranks)
        self.vault.keep(key, model, model.parts)

    def release(self, key: ModelKey) -> None:
        """Idempotent, also while offloaded. A full-parameter copy's memory is free when this returns."""
        self._residents.drop(key)
        self.vault.drop(key)
        if isinstance(self._models.pop(key, None), FullModel):
            allocator.give_back()

    def offload(self) -> None:
        """Set all state aside on the host and give the device's memory back. Nothing to do the second time.

        Only what changed since the last time is copied: never the frozen base, nor tenants without work.
        """
        if self._offloaded:
            return
        self._base_aside.offload(network_tensors(self._base))
        self._residents.offload()
        self._offloaded = True
        allocator.uncache()

    def onload(self) -> None:
        """Bring it back, to the last bit. Nothing to do the second time."""
        if self._offloaded:
            self._base_aside.onload()
            self._residents.onload()
            self._offloaded = False

    def _gave_up(self, error: Exception) -> bool:
        """Whether this rank or, with several, a peer ran out of memory in the pass that raised `error`."""
        short = is_out_of_memory(error)
        if self.spec.ranks == 1 or self._meeting is None:
            return short
        if self.spec.device == "cuda":
            return False  # NCCL's peers hang: see Meeting
        if short:
            self._meeting.give_up()
        elif self._meeting.given_up():
            self._meeting.leave()
            return True
        return short

    def _recover(self) -> None:
        """From a pass that was broken off anywhere. Every rank must call it."""
        if self.spec.ranks > 1:
            self._rejoin()
        else:
            for network in (self._base, *(model.network for model in self._full_models().values())):
                network.reset()
        allocator.give_back()

    def _rejoin(self) -> None:
        """Networks are tied to the process group that they were sharded over: all are loaded again."""
        assert self._meeting is not None
        self._base_aside = OffloadBuffer()
        del self._base, self._runner
        allocator.give_back()
        self.attach(self._meeting.join())
        for key, model in self._full_models().items():
            self._residents.change([key])
            model.move(trainable_network(self.spec, self._ranks.mesh), self._ranks)

    def _fresh(self, key: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily) -> TrainableModel:
        if spec.rank == 0:
            return create_full(key, spec, self.spec, self._ranks, optimizer)
        return LoraModel(spec, self._base.targets, self._ranks.device, optimizer)

    def _full_models(self) -> dict[ModelKey, FullModel]:
        return {key: model for key, model in self._models.items() if isinstance(model, FullModel)}

    def _require_onloaded(self) -> None:
        if self._offloaded:
            raise TrainerError("the trainer's state is set aside: call onload first")

    def _require_known(self, key: ModelKey) -> None:
        if key not in self._models:
            raise StateLostError(f"the trainer has no state of model {key}")

    def _require_room(self, optimizer: OptimizerFamily) -> None:
        memory_budget.require_room(
            sum(parameter.numel() for parameter in self._base.parameters()),
            optimizer,
            network_tensors(self._base),
            self._models.values(),
            self.spec.memory_gb,
            self._ranks,
        )

    def _model(self, key: ModelKey) -> TrainableModel:
        """On the device, to work with: what the host has of it counts as old."""
        model = self._unchanged(key)
        self._residents.change([key])
        return model

    def _unchanged(self, key: ModelKey) -> TrainableModel:
        """On the device, only to read its weights."""
        self._require_onloaded()
        self._require_known(key)
        self._residents.use([key])
        return self._models[key]
