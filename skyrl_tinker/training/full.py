"""Full-parameter models: each has its own sharded, trainable copy of the base."""

from collections.abc import Iterator

import psutil
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from skyrl_tinker.errors import UserError
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.model import Network, trainable_network
from skyrl_tinker.training.offload import network_tensors
from skyrl_tinker.training.spec import TrainerSpec
from skyrl_tinker.training.state import Part, TrainableModel
from skyrl_tinker.wire.ids import ModelKey
from skyrl_tinker.wire.values import LoraSpec

_PREFIX = "causal_lm."
_BYTES_PER_PARAMETER = 16
"""float32 weight, gradient and two moments."""
_BYTES_WHILE_LOADING = 4
"""Every rank reads the whole model before it keeps its shard."""


class FullModel(TrainableModel):
    """Parameters, gradients and moments are this rank's shards; a tied head exists once, as the embedding."""

    def __init__(self, key: ModelKey, spec: LoraSpec, network: Network, ranks: Ranks) -> None:
        super().__init__(spec)
        self.network_key = key
        self.network = network
        self._ranks = ranks
        self._parameters = {
            name.removeprefix(_PREFIX): parameter for name, parameter in network.named_parameters()
        }
        self._index = {name: index for index, name in enumerate(self._parameters)}
        self._saved: list[torch.Tensor | None] = []

    def _weights(self) -> list[torch.Tensor]:
        return [_local(parameter.detach()) for parameter in self._parameters.values()]

    def _own_tensors(self) -> Iterator[torch.Tensor]:
        return network_tensors(self.network)

    def begin(self) -> None:
        """Costs a second set of gradients only while a pass adds to earlier ones."""
        self._saved = [parameter.grad for parameter in self._parameters.values()]
        self._drop_gradients()

    def rollback(self) -> None:
        for parameter, saved in zip(self._parameters.values(), self._saved, strict=True):
            parameter.grad = saved
        self._saved = []

    def _join_gradients(self) -> None:
        for parameter, saved in zip(self._parameters.values(), self._saved, strict=True):
            if saved is not None and parameter.grad is not None:
                parameter.grad.add_(saved)
        self._saved = []

    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def reduced_gradients(self, ranks: Ranks) -> tuple[list[torch.Tensor], torch.Tensor]:
        gradients = [_local(parameter.grad) for parameter in self._parameters.values()]
        norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients])
        square = norms.square().sum()
        ranks.sum_(square)
        return gradients, square.sqrt()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def read(self, part: Part, name: str) -> torch.Tensor:
        like = self._sharded(name)
        local = self.local(part)[self._index[name]]
        whole = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return whole.full_tensor()

    def write(self, part: Part, name: str, tensor: torch.Tensor) -> None:
        like = self._sharded(name)
        whole = tensor.to(self._ranks.device)
        sharded = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        self.local(part)[self._index[name]].copy_(sharded.to_local())

    def _sharded(self, name: str) -> DTensor:
        parameter = self._parameters[name].detach()
        assert isinstance(parameter, DTensor)
        return parameter


def create_full(
    key: ModelKey, spec: LoraSpec, trainer: TrainerSpec, base: Network, ranks: Ranks
) -> FullModel:
    """Every rank must call it. Raises UserError, on all ranks alike, when memory will not do."""
    _require_memory(sum(parameter.numel() for parameter in base.parameters()), ranks)
    return FullModel(key, spec, trainable_network(trainer.directory, trainer.dtype, ranks.mesh), ranks)


def _require_memory(parameters: int, ranks: Ranks) -> None:
    needed = parameters * (_BYTES_PER_PARAMETER / ranks.world + _BYTES_WHILE_LOADING)
    on_gpu = ranks.device.type == "cuda"
    # CPU ranks share one host's memory.
    available = torch.cuda.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available // ranks.world
    if any(ranks.any_([needed > available])):
        raise UserError(
            f"full-parameter training (rank 0) of {parameters:,} parameters needs {needed / 1e9:.1f} GB per "
            f"trainer rank, {available / 1e9:.1f} GB are free: use LoRA, more ranks or a larger machine"
        )


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor), "every parameter takes part in every pass"
    return tensor.to_local()
