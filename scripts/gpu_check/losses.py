"""Every loss and every optimizer, in float32 on the CPU and on the device."""

import tempfile
from collections.abc import Iterator

from gpu_check.checks import Check
from gpu_check.forked import alone
from gpu_check.models import CONFIGS, make_data, make_item, write_base
from gpu_check.rows import Row
from gpu_check.setting import Setting
from gpu_check.training import Task, Tenant, close, train
from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.domain.values import DimuonParams, LoraSpec

LENGTHS = (150, 33)
TOKEN_BUDGET = 512
DIMUON = 1e-3
"""Bound of its weights' error: a sign makes directions of all sizes equally large, those of rounding too."""


def checks(setting: Setting) -> list[Check]:
    each = {ModelKey(number): name for number, name in enumerate(LOSSES, 1)}
    tenants = {key: Tenant(name, LoraSpec(8, key)) for key, name in each.items()}
    dimuon = {
        ModelKey(1): Tenant("LoRA", LoraSpec(8, 1), DimuonParams(1e-3)),
        ModelKey(2): Tenant("full", LoraSpec(0, 2), DimuonParams(1e-3)),
    }
    crossed = dict.fromkeys(dimuon, "cross_entropy")
    return [
        Check("losses", lambda: _losses(setting, tenants, each)),
        Check("Dimuon", lambda: _dimuon(setting, dimuon, crossed)),
    ]


def _losses(setting: Setting, tenants: dict[ModelKey, Tenant], losses: dict[ModelKey, str]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        alone(write_base, "tiny", directory)
        reference, found = (train(_task(setting, directory, tenants, losses, on)) for on in _devices(setting))
    yield from close(f"losses, {setting.device} float32 to cpu float32", found, reference)


def _dimuon(setting: Setting, tenants: dict[ModelKey, Tenant], losses: dict[ModelKey, str]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        alone(write_base, "tiny", directory)
        reference, found = (train(_task(setting, directory, tenants, losses, on)) for on in _devices(setting))
    yield from close(f"Dimuon, {setting.device} float32 to cpu float32", found, reference, DIMUON)


def _devices(setting: Setting) -> tuple[str, str]:
    return "cpu", setting.device


def _task(
    setting: Setting,
    directory: str,
    tenants: dict[ModelKey, Tenant],
    losses: dict[ModelKey, str],
    device: str,
) -> Task:
    vocab = CONFIGS["tiny"].vocab_size
    items = [make_item(key, make_data(LENGTHS, vocab, int(key)), loss) for key, loss in losses.items()]
    return Task(setting.spec(directory, "float32", TOKEN_BUDGET, device=device), tenants, items)
