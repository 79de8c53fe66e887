"""What all checks are given: the device, and with it the sizes."""

import os
from dataclasses import dataclass

import torch

from skyrl_tinker.training.trainer_spec import TrainerSpec

NOT_ON_CPU = "not on cpu"


@dataclass(frozen=True, slots=True)
class Setting:
    """`device`: cuda, or cpu: the same code at small sizes. `ranks`: of trainers in `parity`, `ranks`."""

    device: str
    ranks: int = 1

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    @property
    def threads(self) -> int:
        return 1 if self.small else os.cpu_count() or 1

    def wait(self) -> None:
        """Wait for what is queued on the device."""
        if not self.small:
            torch.cuda.synchronize()

    def spec(
        self,
        directory: str,
        dtype: str,
        token_budget: int,
        *,
        recompute: bool | None = None,
        device: str = "",
        ranks: int = 1,
        resident_models: int = 0,
    ) -> TrainerSpec:
        """`recompute` None: in rows that would not fit otherwise."""
        return TrainerSpec(
            directory,
            ranks,
            device or self.device,
            dtype,
            self.threads,
            token_budget,
            resident_models=resident_models,
            gradient_checkpointing=recompute,
        )
