"""What a trainer is made of. Plain data, free of torch, so that the engine can import it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """`token_budget`: tokens per packed row. `timeout_s`: how long a collective waits for its peers."""

    directory: str  # of the base model, Hugging Face layout
    ranks: int
    device: str  # cpu | cuda
    dtype: str  # float32 | bfloat16
    threads: int
    token_budget: int
    timeout_s: float = 60.0
