"""Full-parameter models: each has its own sharded, trainable copy of the base."""

from collections.abc import Container, Iterator
from functools import partial
from math import ceil, prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec, OptimizerFamily
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models import mixtures
from skyrl_tinker.training.models.lora import require_matrices
from skyrl_tinker.training.models.mixtures import Piece
from skyrl_tinker.training.models.network import Network, network_tensors
from skyrl_tinker.training.models.trainable_model import HostCopy, Kind, Part, TrainableModel, l2_norm
from skyrl_tinker.training.models.weight_loading import local_rows
from skyrl_tinker.training.shortage import Shortage

_PREFIX = "causal_lm."


class FullModel(TrainableModel):
    """A full copy of the base. Tensors are this rank's shards; a tied head exists once, as the embedding.

    Experts are sharded whole: a rank's share of an expert's matrix is all of it or nothing.
    """

    def __init__(
        self, key: ModelKey, spec: LoraSpec, network: Network, ranks: Ranks, optimizer: OptimizerFamily
    ) -> None:
        super().__init__(spec, optimizer)
        require_matrices(network.targets, optimizer)
        self.network_key = key
        self._saved: list[torch.Tensor | None] = []
        self.network = network
        self._ranks = ranks
        self._parameters = {
            name.removeprefix(_PREFIX): parameter for name, parameter in network.named_parameters()
        }
        self._index = {name: index for index, name in enumerate(self._parameters)}
        self._pieces: dict[str, Piece] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        found = mixtures.find_pieces(network.causal_lm)
        for name, parameter in self._parameters.items():
            pieces = {piece.name: piece for piece in found.get(name, ())}
            self._pieces |= pieces
            self._shapes |= {piece.name: piece.shape for piece in pieces.values()}
            if not pieces:
                self._shapes[name] = tuple(parameter.shape)
        tables = [module for module in network.modules() if isinstance(module, nn.Embedding)]
        self._tables = {id(module.weight) for module in tables}

    def _weights(self) -> list[torch.Tensor]:
        return [_local(parameter.detach()) for parameter in self._parameters.values()]

    def _own_tensors(self) -> Iterator[torch.Tensor]:
        return network_tensors(self.network)

    def _local_gradients(self) -> list[torch.Tensor]:
        gradients = (parameter.grad for parameter in self._parameters.values())
        return [_local(gradient) for gradient in gradients if gradient is not None]

    def _keep_gradients(self) -> None:
        """Keep the gradients: costs a second set only while a pass adds to earlier ones."""
        self._saved = [parameter.grad for parameter in self._parameters.values()]
        self._drop_gradients()

    def _restore_gradients(self) -> None:
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
        return gradients, self._global_norm(gradients, ranks)

    def _global_norm(self, tensors: list[torch.Tensor], ranks: Ranks) -> torch.Tensor:
        norms = torch.stack(list(map(l2_norm, tensors)))
        square = norms.square().sum()
        ranks.sum_(square)
        return square.sqrt()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def kind(self, name: str) -> Kind:
        if name in self._pieces:
            return Kind.MATRIX
        parameter = self._parameters[name]
        if id(parameter) in self._tables:
            return Kind.TABLE
        return Kind.MATRIX if parameter.dim() == 2 else Kind.VECTOR

    def share(self, part: Part, name: str) -> torch.Tensor:
        if part is Part.WEIGHT:  # not via `local`, which would list all weights for each name
            piece = self._pieces.get(name)
            if piece is None:
                return _local(self._parameters[name].detach())
            return piece.of(_local(self._parameters[piece.owner].detach()), self._first(piece))
        return super().share(part, name)

    def select(self, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        piece = self._pieces.get(name)
        if piece is None:
            return tensors[self._index[name]]
        return piece.of(tensors[self._index[piece.owner]], self._first(piece))

    def gather(self, name: str, share: torch.Tensor) -> torch.Tensor:
        if piece := self._pieces.get(name):
            owner = self._owner(piece)
            whole = share if owner == self._ranks.rank else share.new_empty(piece.shape)
            self._ranks.broadcast_(whole, owner)
            return whole
        return self._as_dtensor(name, share).full_tensor()

    def shard(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        if piece := self._pieces.get(name):
            mine = self._owner(piece) == self._ranks.rank
            return (whole if mine else whole[:0]).to(self._ranks.device)
        like = self._sharded(name)
        whole = whole.to(self._ranks.device)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()

    def rows(self, name: str) -> slice:
        if piece := self._pieces.get(name):
            return slice(None if self._owner(piece) == self._ranks.rank else 0)
        local, first = local_rows(self._sharded(name))
        return slice(first, first + len(local))

    def host_copies(
        self, part: Part, copy: HostCopy, names: Container[str], shortage: Shortage
    ) -> dict[str, torch.Tensor]:
        """Return copies, or raise ExhaustedError where a rank could not gather the largest tensor."""
        largest = max(map(prod, self._shapes.values()))
        shortage.survive(partial(self._weights()[0].new_empty, 2 * largest))  # gathered, and put in order
        shortage.agree(self._ranks)
        copies: dict[str, torch.Tensor] = {}

        def keep(name: str, whole: torch.Tensor) -> None:
            copies[name] = copy(whole)

        for name in self._shapes:
            whole = self.read(part, name)
            if name in names and not shortage:
                shortage.survive(partial(keep, name, whole))
            del whole  # before the next one is gathered
        return copies

    def _experts_per_rank(self, piece: Piece) -> int:
        """Return how many experts FSDP gives to each rank but the last ones."""
        return ceil(len(self._parameters[piece.owner]) / self._ranks.world)

    def _owner(self, piece: Piece) -> int:
        """Return the rank that holds the expert."""
        return piece.expert // self._experts_per_rank(piece)

    def _first(self, piece: Piece) -> int:
        """Return the first expert of this rank."""
        return self._ranks.rank * self._experts_per_rank(piece)

    def _as_dtensor(self, name: str, share: torch.Tensor) -> DTensor:
        """Return the DTensor of which `share` is this rank's part, laid out as the parameter is."""
        like = self._sharded(name)
        return DTensor.from_local(
            share, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _sharded(self, name: str) -> DTensor:
        parameter = self._parameters[name].detach()
        assert isinstance(parameter, DTensor)
        return parameter


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor), "every parameter takes part in every pass"
    return tensor.to_local()
