"""Memory that training takes on the device of one rank. Bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Most memory that one packed row takes, forward and backward: a bound, exact for the longest one."""

    fixed: int
    per_token: int
    longest: int  # tokens; nothing is known of longer rows

    def needed(self, tokens: int) -> int:
        return self.fixed + self.per_token * tokens

    def tokens_within(self, room: float) -> int:
        return min(self.longest, max(0, int((room - self.fixed) // self.per_token)))


@dataclass(frozen=True, slots=True)
class MemoryCosts:
    """Memory of a base model and of the models trained on it."""

    parameters: int  # of the base model, all of them
    trained: int  # parameters of one model in training: its adapter's, or all
    weights: int  # of the frozen base: this rank's share
    state: int  # of one model in training: weights, gradients, moments; this rank's share
    kept: RowMemory  # all activations wait for the backward pass
    recomputed: RowMemory  # the layers' inputs only
