"""Abilities in which sampling engines differ. What a server's engine lacks is refused by name."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from skyrl_tinker.errors import NotSupportedError


@dataclass(frozen=True, slots=True)
class SamplerAbilities:
    """Sampling engine by the fields of a request that it serves. `lowest_temperature`: above 0."""

    engine: str = ""
    lowest_temperature: float = 0.0
    seed: bool = True
    target_prompt_logprobs: bool = True
    prompt_alt_tokens_k: bool = True

    def __str__(self) -> str:
        lacking = [each.name for each in fields(self) if getattr(self, each.name) is False]
        return f"{self.engine} without {', '.join(lacking)}" if lacking else self.engine

    def require(self, asked: Iterable[str]) -> None:
        """Raise NotSupportedError that names the first field that it does not serve."""
        for field in asked:
            if not getattr(self, field):
                text = "is not supported by this server's sampling engine"
                raise NotSupportedError(f"{field} {text}, {self.engine}")

    def refusal(self, temperature: float) -> str | None:
        """Return what is wrong with a temperature, None if nothing is."""
        if 0 < temperature < self.lowest_temperature:
            least = self.lowest_temperature
            return f"temperature: expected 0 (greedy) or at least {least}, found {temperature}"
        return None


ALL_ABILITIES = SamplerAbilities()
