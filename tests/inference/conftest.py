from tests.inference.support.samplers import each_sampler, sampler

__all__ = ["each_sampler", "sampler"]
