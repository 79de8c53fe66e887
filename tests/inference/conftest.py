from tests.inference.samplers import each_sampler, sampler

__all__ = ["each_sampler", "sampler"]
