import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tinker.training.checkpoints.tensor_files import deal, shard_name


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_every_tensor_is_dealt_once_and_no_share_has_much_more_than_another(
    sizes: list[int], shares: int
) -> None:
    by_name = {f"t{number}": size for number, size in enumerate(sizes)}
    dealt = deal(by_name, shares)
    loads = [sum(by_name[name] for name in share) for share in dealt]
    assert len(loads) == min(shares, len(sizes))
    assert min(loads) > 0
    assert max(loads) <= sum(sizes) / len(loads) + max(sizes)
    assert [name for share in dealt for name in share] == list(by_name)


def test_layers_stay_whole_but_at_the_borders() -> None:
    parts = {"q": 4, "k": 1, "v": 1, "gate": 12, "up": 12, "down": 12}
    layers = {f"{layer}.{part}": size for layer in range(8) for part, size in parts.items()}
    names = {"embed": 200} | layers | {"head": 200}
    shares = [{name.partition(".")[0] for name in share} for share in deal(names, 4)]
    assert sum(map(len, shares)) <= len(set().union(*shares)) + 3


@pytest.mark.parametrize(
    ("index", "count", "name"), [(0, 1, "model.safetensors"), (0, 4, "model-00001-of-00004.safetensors")]
)
def test_shards_are_named_as_hugging_face_names_them(index: int, count: int, name: str) -> None:
    assert shard_name("model", index, count) == name
