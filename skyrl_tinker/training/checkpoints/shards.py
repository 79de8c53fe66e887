"""How the tensors of a checkpoint are dealt to the ranks that write them, and what their files are called."""

from collections.abc import Mapping

SUFFIX = ".safetensors"


def deal(sizes: Mapping[str, int], shares: int) -> list[list[str]]:
    """The names of each share, about equal in size: the largest first, each to the share that has least.

    Within a share names keep their order. There are fewer shares than asked for when names are too few.
    """
    dealt: list[set[str]] = [set() for _ in range(min(shares, len(sizes)))]
    loads = [0] * len(dealt)
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = loads.index(min(loads))
        dealt[least].add(name)
        loads[least] += sizes[name]
    return [[name for name in sizes if name in share] for share in dealt]


def shard_name(stem: str, index: int, count: int) -> str:
    """As Hugging Face names shards: model.safetensors, or model-00001-of-00002.safetensors and so on."""
    return f"{stem}{SUFFIX}" if count == 1 else f"{stem}-{index + 1:05}-of-{count:05}{SUFFIX}"
