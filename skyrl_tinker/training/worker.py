"""One rank of the trainer: a plain class, which Ray runs as an actor and tests use directly."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.manifest import CheckpointContents, FileEntry
from skyrl_tinker.domain.values import LoraSpec, OptimizerFamily, StepItem, StepOutput
from skyrl_tinker.errors import SEND_AGAIN, ExhaustedError, StateLostError, TrainerError
from skyrl_tinker.system.atomic_directory import storage_errors
from skyrl_tinker.system.host_memory import host_memory
from skyrl_tinker.system.interfaces import interface_of
from skyrl_tinker.system.processes import freeze_gc, run_nicely
from skyrl_tinker.training import distributed
from skyrl_tinker.training.batching.batch import TrainingInputBatch
from skyrl_tinker.training.batching.outputs import RankOutput
from skyrl_tinker.training.checkpoints import checkpoint_load, checkpoint_save
from skyrl_tinker.training.checkpoints.checkpoint_save import Captured, Layout
from skyrl_tinker.training.distributed import MeetingPlace, Ranks
from skyrl_tinker.training.host_files import HostFiles
from skyrl_tinker.training.memory import allocator, memory_budget
from skyrl_tinker.training.memory.activation_memory import ActivationMemory
from skyrl_tinker.training.memory.device_cache import DeviceCache
from skyrl_tinker.training.memory.offload import OffloadBuffer
from skyrl_tinker.training.models.full_parameter import FullModel
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.network import frozen_network, network_tensors, trainable_network
from skyrl_tinker.training.models.trainable_model import TrainableModel
from skyrl_tinker.training.optimizers.step import optim_step
from skyrl_tinker.training.passes.out_of_memory import refuse_models, refuse_rows
from skyrl_tinker.training.passes.pass_runner import PassRunner
from skyrl_tinker.training.shortage import Shortage
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.weight_share import WeightShare


@contextmanager
def _out_of_memory(operation: str) -> Iterator[None]:
    """Make an ExhaustedError name the operation, which has changed nothing, and give memory back."""
    try:
        yield
    except ExhaustedError as error:
        traceback.clear_frames(error.__traceback__)  # frames keep allocations alive
        allocator.give_back()
        raise ExhaustedError(
            f"{operation}: a trainer rank ran out of memory ({error}). Nothing has changed, and gradients "
            f"that a model has accumulated are kept: {SEND_AGAIN}start the server with fewer resident models "
            "or more trainer ranks"
        ) from None


class Worker:
    """One rank. All ranks get the same calls in the same order, and each call may be a collective.

    Exceptions, which may run concurrently: `persist_state`, `commit_state`, `write_state`, `captured_share`
    and `drop_captured`.
    """

    def __init__(self, spec: TrainerSpec, rank: int, address: str = "127.0.0.1") -> None:
        """`address`: IP address at which the other ranks reach this host."""
        torch.set_num_threads(spec.threads)
        allocator.keep_freed()
        self.spec = spec
        self.rank = rank
        self.files = HostFiles(spec.memory_root)
        self._address = address
        self._models: dict[ModelKey, TrainableModel] = {}
        self._device_cache = DeviceCache(self._models, spec.resident_models)
        self._base_buffer = OffloadBuffer()
        self._captured: dict[int, Captured] = {}
        self._offloaded = False
        self._asked_for = True  # whether the state is wanted on the device

    def meeting_place(self, hosts: int) -> MeetingPlace:
        """Choose the place at which ranks on that many hosts meet, on rank 0 only."""
        return distributed.meeting_place(self.spec.memory_root, hosts, self._address)

    def join(self, place: MeetingPlace) -> None:
        """Form the group, then load the base model without another collective; `measure` follows."""
        spec = self.spec
        interface = spec.network_interface or interface_of(self._address)
        ranks = distributed.join(place, self.rank, spec.ranks, spec.device, spec.timeout_s, interface)
        self._load(ranks)

    def attach(self, ranks: Ranks, causal_lm: Any = None) -> None:
        """Load the base model, sharded over `ranks`; or take `causal_lm`, which calls our attention."""
        self._load(ranks, causal_lm)
        self.measure()

    def _load(self, ranks: Ranks, causal_lm: Any = None) -> None:
        self._ranks = ranks
        load = partial(frozen_network, self.spec, ranks.mesh, causal_lm)
        self._base = run_nicely(load, self.spec.start_niceness)

    def measure(self) -> None:
        """Measure the memory of rows with two short passes, and make the pass runner: units may follow."""
        ranks = self._ranks
        activations = ActivationMemory.measure(self._base, self.spec.gradient_checkpointing, ranks)
        self._runner = PassRunner(self._base, self._models, ranks, activations.recomputed)
        self._frugal_runner = replace(self._runner, recomputed=activations.most_recomputed)
        freeze_gc()

    @_out_of_memory("create_model")
    def create_model(
        self, key: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily = "adamw"
    ) -> tuple[int, int]:
        """Create a model; returns the bytes of its weights, and of its state.

        ExhaustedError is of this rank alone: release the model on all.

        Reading weights has no time limit, as no collective waits for a slow disk.
        """
        self._have_onloaded()
        if key in self._models:
            raise TrainerError(f"model {key} exists already")
        if spec.rank == 0:
            size = sum(parameter.numel() for parameter in self._base.parameters())
            memory_budget.require_memory(size, optimizer, self._models.values(), self._ranks)
        shortage = Shortage()
        shortage.survive(lambda: self._add_model(key, self._make_model(key, spec, optimizer)))
        shortage.report()
        return self._models[key].weight_bytes, self._models[key].state_bytes

    def host_memory(self) -> int:
        return host_memory().total

    def _add_model(self, key: ModelKey, model: TrainableModel) -> None:
        self._models[key] = model
        self._device_cache.add(key)

    def run_pass(self, batch: TrainingInputBatch, token_budget: int | None = None) -> RankOutput:
        """Run a pass in rows of `token_budget` tokens, by default that of the spec.

        If they are fewer, memory has run out before: all layers run again, whatever seems to fit.
        """
        budget, loaded = token_budget or self.spec.token_budget, False
        try:
            self._have_onloaded()
            self._load_models([info.model for info in batch.requests])
            loaded = True
            self._device_cache.mark_changed({info.model for info in batch.requests if info.backward})
            runner = self._frugal_runner if budget < self.spec.token_budget else self._runner
            return runner.execute_pass(batch, budget)
        except ExhaustedError as error:
            reason = str(error)  # refused below: the error's traceback keeps the pass's allocations alive
        if not loaded:
            return refuse_models(batch, reason)
        return refuse_rows(batch, budget, self.spec.token_budget, reason)

    def _load_models(self, models: Sequence[ModelKey]) -> None:
        """Load models onto the device. Raises ExhaustedError, on all ranks alike."""
        shortage = Shortage()
        shortage.survive(lambda: self._device_cache.load(models))
        if self.spec.resident_models:  # else all are there
            shortage.agree(self._ranks)

    def optim_step(self, steps: Sequence[StepItem]) -> list[StepOutput]:
        for item in steps:
            self._require_known(item.model)  # if one is lost, no model steps
        return [self._step(item) for item in steps]

    def _step(self, item: StepItem) -> StepOutput:
        try:
            with _out_of_memory("optim_step"):
                return optim_step(self._model_to_change(item.model), item, self._ranks)
        except ExhaustedError as error:
            return StepOutput(item.request_id, {}, str(error), exhausted=True)

    def zero_gradients(self, models: Sequence[ModelKey]) -> None:
        """Clear gradients, also where `onload` has had no memory."""
        if not self._asked_for:
            self._require_onloaded()
        for key in models:
            self._require_known(key)
        self._device_cache.clear_gradients(models, all_offloaded=self._offloaded)

    @_out_of_memory("save_weights_for_sampler")
    def capture_weights(
        self, numbers: Mapping[ModelKey, int], durable: Mapping[ModelKey, bool]
    ) -> dict[ModelKey, CheckpointContents]:
        """Keep host copies of each model's weights for samplers under its number, as `capture_state` does."""
        for key in numbers:
            self._require_known(key)  # if one is lost, none is captured
        captured = {
            number: self._copy(key, False, self._sampler_layout(key, durable[key]))
            for key, number in numbers.items()
        }
        self._captured |= captured  # all or, where memory runs out, none
        return {key: captured[number].contents for key, number in numbers.items()}

    def _sampler_layout(self, key: ModelKey, durable: bool) -> Layout:
        """Return a layout in the samplers' dtype; float32 for durable adapters, which may train again."""
        if durable and isinstance(self._models[key], LoraModel):
            return checkpoint_save.STATE
        return Layout(getattr(torch, self.spec.dtype), checked=durable, pinned=True)

    @_out_of_memory("save_weights")
    def capture_state(self, key: ModelKey, number: int, optimizer: bool) -> CheckpointContents:
        """Keep host copies of this rank's share under `number` until they are persisted."""
        return self._capture(key, number, optimizer, checkpoint_save.STATE)

    def capture_states(
        self, numbers: Mapping[ModelKey, int], most_bytes: int
    ) -> dict[ModelKey, CheckpointContents]:
        """Do as `capture_state` with the first model, and with those after it whose states fit, together."""
        contents: dict[ModelKey, CheckpointContents] = {}
        left = most_bytes
        for key, number in numbers.items():
            if contents and (key not in self._models or self._models[key].state_bytes > left):
                break
            try:
                contents[key] = self.capture_state(key, number, optimizer=True)
            except ExhaustedError:
                if not contents:
                    raise
                break
            left -= self._models[key].state_bytes
        return contents

    @_out_of_memory("save_weights_external")
    def capture_export(self, key: ModelKey, number: int, shard_bytes: int) -> CheckpointContents:
        """Capture the weights alone, for use elsewhere: an adapter, or shards in the trainer's dtype."""
        if isinstance(self._model_to_read(key), LoraModel):
            return self._capture(key, number, False, checkpoint_save.STATE)
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return self._capture(key, number, False, Layout(dtype, shard_bytes))

    def _capture(self, key: ModelKey, number: int, optimizer: bool, layout: Layout) -> CheckpointContents:
        self._captured[number] = captured = self._copy(key, optimizer, layout)
        return captured.contents

    def _copy(self, key: ModelKey, optimizer: bool, layout: Layout) -> Captured:
        return checkpoint_save.capture(
            self._model_to_read(key),
            self.spec.directory,
            optimizer=optimizer,
            rank=self.rank,
            world=self.spec.ranks,
            layout=layout,
            agree=lambda shortage: shortage.agree(self._ranks),
        )

    def persist_state(self, number: int, scratch: str) -> dict[str, FileEntry]:
        """Write the share captured under `number`, in any thread, until `drop_captured`."""
        with storage_errors(f"rank {self.rank} could not write the checkpoint"):
            return checkpoint_save.persist(self._captured[number], self.files.here(scratch))

    def captured_share(self, number: int) -> WeightShare:
        """Return the weights captured under `number`, until `drop_captured`, for this rank's sender."""
        captured = self._captured[number]
        tensors = {name: tensor for file in captured.files.values() for name, tensor in file.items()}
        return WeightShare(self.rank, captured.dtype, captured.dealt, tensors, self._ranks.transfers)

    def drop_captured(self, number: int) -> None:
        """Free the capture `number`; harmless if there is none."""
        self._captured.pop(number, None)

    def commit_state(self, number: int, files: Mapping[str, FileEntry], scratch: str, directory: str) -> int:
        """Commit, on one rank only, in any thread, after all have persisted. Returns bytes."""
        contents = self._captured[number].contents
        with storage_errors(f"rank {self.rank} could not write the checkpoint"):
            return checkpoint_save.commit(contents, files, Path(scratch), Path(directory))

    def write_state(self, number: int, scratch: str, directory: str) -> int:
        """Persist and commit a checkpoint that this rank writes alone, in any thread. Returns its bytes."""
        return self.commit_state(number, self.persist_state(number, scratch), scratch, directory)

    @_out_of_memory("load_weights")
    def load_state(self, key: ModelKey, directory: str, optimizer: bool) -> None:
        model = self._model_to_change(key)
        checkpoint_load.load(model, self.files.here(directory), optimizer=optimizer, ranks=self._ranks)

    def release(self, key: ModelKey) -> None:
        """Release a model, also while offloaded. Idempotent. Frees a full copy's memory at once."""
        self._device_cache.remove(key)
        if isinstance(self._models.pop(key, None), FullModel):
            allocator.give_back()

    def offload(self) -> None:
        """Offload all state to the host and return the device's memory. Idempotent.

        Only state that changed since the last time is copied: never the frozen base, nor tenants without
        work.
        """
        self._asked_for = False
        if not self._offloaded:
            self._free_device()
            self._offloaded = True

    def onload(self) -> None:
        """Restore all state on the device, to the last bit. Idempotent.

        Raises ExhaustedError, on all ranks alike, with the device free again: the next unit tries again.
        """
        self._asked_for = True
        if self._offloaded:
            shortage = Shortage()
            if not shortage.survive(self._restore):
                self._free_device()  # the ranks' agreement takes memory, too
            try:
                shortage.agree(self._ranks)
            except ExhaustedError:
                self._free_device()
                raise
            self._offloaded = False

    def _restore(self) -> None:
        self._base_buffer.onload()
        self._device_cache.onload()

    def _free_device(self) -> None:
        self._base_buffer.offload(network_tensors(self._base))
        self._device_cache.offload()
        allocator.empty_cuda_cache()

    def _make_model(self, key: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily) -> TrainableModel:
        if spec.rank == 0:
            network = trainable_network(self.spec, self._ranks.mesh)
            return FullModel(key, spec, network, self._ranks, optimizer)
        return LoraModel(spec, self._base.targets, self._ranks.device, optimizer)

    def _have_onloaded(self) -> None:
        """Retry an `onload` that ran out of memory. Raises ExhaustedError, on all ranks alike."""
        if self._asked_for:
            self.onload()
        self._require_onloaded()

    def _require_onloaded(self) -> None:
        if self._offloaded:
            raise TrainerError("the trainer's state is offloaded: call onload first")

    def _require_known(self, key: ModelKey) -> None:
        if key not in self._models:
            raise StateLostError(f"the trainer has no state of model {key}")

    def _model_to_change(self, key: ModelKey) -> TrainableModel:
        """Return a model on the device, to change it: its host copy becomes invalid."""
        model = self._model_to_read(key)
        self._device_cache.mark_changed([key])
        return model

    def _model_to_read(self, key: ModelKey) -> TrainableModel:
        """Return a model on the device, only to read its weights."""
        self._have_onloaded()
        self._require_known(key)
        self._load_models([key])
        return self._models[key]
