"""Prefixes stay on a replica, and none of them fills it."""

from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from skyrl_tinker.domain.ids import VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.sampler import affinity as affinity_module
from skyrl_tinker.engine.sampler.affinity import LEAST, Affinity

SYSTEM = list(range(200))


def tokens(*parts: list[int]) -> bytes:
    return array("q", [token for part in parts for token in part]).tobytes()


def key_of(affinity: Affinity, prompt: bytes) -> str:
    with affinity.key(None, prompt, 1) as key:
        return key


def test_one_at_a_time_keeps_its_key_whatever_follows_the_beginning() -> None:
    affinity = Affinity(lambda: 2)
    keys = {key_of(affinity, tokens(SYSTEM, [number])) for number in range(10)}
    assert len(keys) == 1
    assert key_of(affinity, tokens([7], SYSTEM)) not in keys


def test_many_with_one_beginning_part_and_no_key_has_more_than_half_of_a_share() -> None:
    affinity = Affinity(lambda: 2)
    with ExitStack() as stack:
        prompts = [tokens(SYSTEM, [number] * 100) for number in range(64)]
        keys = [stack.enter_context(affinity.key(None, prompt, 1)) for prompt in prompts]
        most = Counter(keys).most_common(1)[0][1]
        assert most <= 64 / 4
        stack.enter_context(affinity.key(None, prompts[0], 1))
    assert key_of(affinity, prompts[5]) == keys[0], "nothing is in flight any more"


def test_turns_of_a_conversation_stay_together_where_its_beginning_is_full() -> None:
    affinity = Affinity(lambda: 2)
    with ExitStack() as stack:
        for number in range(LEAST):
            stack.enter_context(affinity.key(None, tokens(SYSTEM, [number] * 100), 1))
        first, other = tokens(SYSTEM, [1] * 100), tokens(SYSTEM, [2] * 100)
        assert (
            key_of(affinity, first) == key_of(affinity, first + tokens([3] * 500)) != key_of(affinity, other)
        )


def test_the_same_prompt_again_and_again_goes_elsewhere_in_the_end() -> None:
    affinity = Affinity(lambda: 4)
    with ExitStack() as stack:
        keys = {stack.enter_context(affinity.key(None, tokens([1]), 8)) for _ in range(16)}
        assert len(keys) >= 8


def test_other_weights_have_other_keys() -> None:
    affinity, weights = Affinity(lambda: 2), WeightVersion(VersionId(1), "lora", "/adapter")
    with affinity.key(weights, tokens([1]), 1) as one, affinity.key(None, tokens([1]), 1) as other:
        assert one != other


class Unwalked(Counter[str]):
    """Sequences by key, none of which may be looked for among the others."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("a walk over all keys")

    keys = values = items = total = most_common = __iter__  # type: ignore[assignment]


def test_a_choice_does_not_walk_over_the_keys_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity_module, "Counter", Unwalked)
    affinity = Affinity(lambda: 2)
    with ExitStack() as stack:
        prompts = [tokens(SYSTEM, [number] * 100) for number in range(64)]
        assert len({stack.enter_context(affinity.key(None, prompt, 1)) for prompt in prompts}) > 1
