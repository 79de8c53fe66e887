"""Why a replica that a failure leaves in the middle of an update over NCCL or IPC is lost, never restored."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from math import isnan

from torch import Tensor, full, nn, use_deterministic_algorithms

OLD, NEW = 1.0, 2.0


class FusedLayer(nn.Module):
    """gate and up in one weight, each loaded by itself, as vLLM's linear layers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(full((2, 3), OLD), requires_grad=False)
        self.weight.weight_loader = self.load_shard

    def load_shard(self, param: Tensor, loaded: Tensor, shard: int) -> None:
        param.data[shard].copy_(loaded)

    def load_weights(self, value: float, *shards: int) -> None:
        weight = self.weight  # vLLM's models look parameters up once for all weights that they are given
        for shard in shards:
            weight.weight_loader(weight, full((3,), value), shard)


def reload_twice(first: list[int]) -> list[list[float]]:
    """Load these shards of new weights, then all of the old ones, by vLLM's reload; return what is served."""
    from vllm.model_executor.model_loader.reload import layerwise

    use_deterministic_algorithms(True)  # memory that nobody wrote is NaN
    layer = FusedLayer()
    layerwise.record_metadata_for_reloading(layer)
    layerwise.initialize_layerwise_reload(layer)
    layer.load_weights(NEW, *first)
    if len(first) == 2:
        layerwise.finalize_layerwise_processing(layer, None)
    layerwise.initialize_layerwise_reload(layer)
    layer.load_weights(OLD, 0, 1)
    layerwise.finalize_layerwise_processing(layer, None)
    return layer.weight.tolist()


def test_the_old_weights_do_not_come_back_after_half_an_update() -> None:
    """vLLM counts what it had of a layer, and drops what comes last of the old weights."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # imports all of vLLM's layers
        whole, half = pool.map(reload_twice, ([0, 1], [0]))
    assert whole == [[OLD] * 3] * 2
    assert half[0] == [OLD] * 3
    assert all(isnan(value) for value in half[1])
