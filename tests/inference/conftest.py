from tests.inference.samplers import each_sampler, sampler, servers

__all__ = ["each_sampler", "sampler", "servers"]
