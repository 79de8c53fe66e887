"""Configuration of a trainer. Plain data, free of torch, so that the engine can import it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """Configuration of a trainer, the same on all ranks.

    `token_budget`: tokens per packed row. `timeout_s`: time that a collective waits for its peers.
    `resident_models`: LoRA models whose state is on the device at once, 0 = all. `gradient_checkpointing`:
    layers run twice to keep less; None: in rows that would not fit otherwise. `network_interface`: for
    traffic between ranks, None = that of the host's address in Ray. `start_niceness`: of the imports and the
    load at a rank's start, which then take less from others that work. `expandable_segments`: allocate GPU
    memory in these, against fragmentation; False where samplers map it by CUDA IPC, which needs a privilege
    for such memory. `memory_root`: directory in the memory of each host; files that ranks write below it on
    other hosts are copied to the engine's.
    """

    directory: str  # of the base model, Hugging Face layout
    ranks: int
    device: str  # cpu | cuda
    dtype: str  # float32 | bfloat16
    threads: int
    token_budget: int
    timeout_s: float = 60.0
    resident_models: int = 0
    gradient_checkpointing: bool | None = None
    network_interface: str | None = None
    start_niceness: int = 0
    expandable_segments: bool = False
    memory_root: str = "/dev/shm"


def retry_budget(token_budget: int) -> int:
    """Return the tokens per row with which a pass that ran out of memory is run again."""
    return max(1, token_budget // 2)
