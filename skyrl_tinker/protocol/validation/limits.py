"""Limits of requests by the base model that they concern, and checks of ids against them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_tinker.domain.sampler_abilities import ALL_ABILITIES, SamplerAbilities
from skyrl_tinker.errors import UserError

MAX_DATUMS = 4096
"""Most datums of a forward_backward."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests of one base model.

    `max_targets`: target tokens of one forward_backward, all candidates of all datums counted.
    """

    base_model: str
    vocab_size: int
    context_length: int
    max_lora_rank: int
    max_datums: int = MAX_DATUMS
    max_targets: int = 1 << 22
    sampler: SamplerAbilities = ALL_ABILITIES


def check_ids(ids: Sequence[int], field: str, vocab_size: int, lowest: int = 0) -> None:
    """Raise UserError that names the first id outside [lowest, vocab_size)."""
    if ids and not _are_within(ids, lowest, vocab_size):
        index, token = next((i, token) for i, token in enumerate(ids) if not lowest <= token < vocab_size)
        raise UserError(f"{field}[{index}] is {token}, expected a token id in [{lowest}, {vocab_size})")


def _are_within(ids: Sequence[int], lowest: int, end: int) -> bool:
    """Compare machine numbers: Python's `min` and `max` take most of a sample's check."""
    try:
        packed = array("q" if lowest else "I", ids)  # the latter has none below 0
    except OverflowError:
        return False
    values = np.frombuffer(packed, packed.typecode)
    return bool(values.max() < end and (not lowest or values.min() >= lowest))
