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
class RowPeak:
    """Most memory that one row takes, by the number of layers that run again in backward, the first ones.

    When backward comes to the last of them, it has freed all that the layers behind it keep. So each one
    takes away what it would keep, down to the peak within a layer that runs again: that of a row all of whose
    layers do.
    """

    kept: float  # if none runs again
    recomputed: float  # if all do
    layer: float  # that each takes away
    layers: int

    def needed(self, again: int) -> float:
        return max(self.kept - again * self.layer, self.recomputed) if again else self.kept

    def again_within(self, room: float, choice: bool | None = None) -> int:
        """Count the fewest layers that must run again for the row to fit; all, if it does not fit even so.

        `choice`: all or none, whatever the room.
        """
        if choice is not None:
            return self.layers if choice else 0
        return next((again for again in range(self.layers) if self.needed(again) <= room), self.layers)


@dataclass(frozen=True, slots=True)
class MemoryCosts:
    """Memory of a base model and of the models trained on it."""

    parameters: int  # of the base model, all of them
    trained: int  # parameters of one model in training: its adapter's, or all
    weights: int  # of the frozen base: this rank's share
    state: int  # of one model in training: weights, gradients, moments; this rank's share
    kept: RowMemory  # all activations wait for the backward pass
    recomputed: RowMemory  # the layers' inputs only
    layer: RowMemory  # activations of one layer without its input
    layers: int

    def row(self, tokens: int) -> RowPeak:
        kept, recomputed, layer = (
            memory.needed(tokens) for memory in (self.kept, self.recomputed, self.layer)
        )
        return RowPeak(kept, recomputed, layer, self.layers)
