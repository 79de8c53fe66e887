"""Adapters and full parameters of every family: experts, sinks, windows, and the head sizes of each."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack

from gpu_check.checks import Check
from gpu_check.forked import alone
from gpu_check.models import CONFIGS, make_data, make_item, write_base
from gpu_check.rows import Row, failed
from gpu_check.setting import Setting
from gpu_check.training import Outcome, Task, Tenant, close, similar, train_each
from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec, PassItem
from skyrl_tinker.server.base_models.tiny_families import FAMILIES

TENANTS = {
    ModelKey(1): Tenant("LoRA", LoraSpec(12, 1)),  # scales and widths that are no power of two
    ModelKey(2): Tenant("LoRA of attention", LoraSpec(6, 2, train_mlp=False, train_unembed=False)),
    ModelKey(3): Tenant("full", LoraSpec(0, 3)),
}
LENGTHS = (150, 1, 300, 33)
SMALL_LENGTHS = (40, 1, 20)
TOKEN_BUDGET = 600


def checks(setting: Setting) -> list[Check]:
    return [Check("families", lambda: _families(setting))]


def _families(setting: Setting) -> Iterator[Row]:
    with ExitStack() as stack:
        directories = {
            name: stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{name}-")) for name in FAMILIES
        }
        alone(_write_bases, directories)
        expected = _train(setting, "cpu", "float32", directories)
        for dtype in ("float32", "bfloat16"):
            found = _train(setting, setting.device, dtype, directories)
            for name in FAMILIES:
                title = f"{name}, {setting.device} {dtype} to cpu float32"
                yield from _compare(title, name, dtype, found[name], expected[name])


def _write_bases(directories: dict[str, str]) -> None:
    for name, directory in directories.items():
        write_base(name, directory)


def _train(
    setting: Setting, device: str, dtype: str, directories: dict[str, str]
) -> dict[str, Outcome | str]:
    tasks = [
        Task(setting.spec(directory, dtype, TOKEN_BUDGET, device=device), TENANTS, _items(name, setting))
        for name, directory in directories.items()
    ]
    return dict(zip(directories, train_each(tasks), strict=True))


def _compare(
    title: str, name: str, dtype: str, found: Outcome | str, expected: Outcome | str
) -> Iterator[Row]:
    if isinstance(found, str) or isinstance(expected, str):
        yield failed(title, found if isinstance(found, str) else f"on the CPU: {expected}")
    elif dtype == "float32":
        yield from close(title, found, expected)
    else:  # the experts of gpt-oss cannot be replayed
        yield from similar(title, found, expected, choices=FAMILIES[name].whole_experts)


def _items(name: str, setting: Setting) -> list[PassItem]:
    lengths = SMALL_LENGTHS if setting.small else LENGTHS
    replay = bool(FAMILIES[name].experts) and not FAMILIES[name].whole_experts
    vocab = CONFIGS[name].vocab_size
    return [make_item(key, make_data(lengths, vocab, int(key), replay=replay)) for key in TENANTS]
