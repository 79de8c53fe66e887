"""What a trainer is made of. Plain data, free of torch, so that the engine can import it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """`token_budget`: tokens per packed row. `timeout_s`: how long a collective waits for its peers.
    `resident_models`: LoRA models whose state is on the device at once, 0 = all. `memory_gb`: what models
    may hold per rank, None = what the machine has. `gradient_checkpointing`: layers run twice to keep less.
    `state_dir`: of the trainer alone, in memory best (tmpfs): what models are is kept there as well, and
    outlives a rank that dies; None: models die with it.
    """

    directory: str  # of the base model, Hugging Face layout
    ranks: int
    device: str  # cpu | cuda
    dtype: str  # float32 | bfloat16
    threads: int
    token_budget: int
    timeout_s: float = 60.0
    resident_models: int = 0
    memory_gb: float | None = None
    gradient_checkpointing: bool = False
    state_dir: str | None = None
