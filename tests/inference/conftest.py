from tests.inference.support.mixtures import mixture
from tests.inference.support.samplers import each_sampler, sampler

__all__ = ["each_sampler", "mixture", "sampler"]
