"""Ranks that vLLM's slots for adapters can have."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
WARM_UP_RANK = 8  # of the adapters with which a sampler warms up


def slot_rank(rank: int) -> int:
    """Return the rank of slots for adapters of at most this rank; 0 for no adapters."""
    return next(each for each in (0, *RANKS) if each >= rank)


def expert_slot_rank(rank: int, experts_per_token: int) -> int:
    """Return the rank of each expert's slots, given the rank of other layers' slots."""
    return slot_rank(max(1, min(rank, WARM_UP_RANK), rank // experts_per_token))
