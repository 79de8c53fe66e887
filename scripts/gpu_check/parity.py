"""The same training in float32 on the CPU, and on the device in either type, layers recomputed or not."""

import tempfile
from collections.abc import Iterator
from functools import partial

from gpu_check.checks import Check
from gpu_check.forked import alone
from gpu_check.models import CONFIGS, make_data, make_item, write_base
from gpu_check.rows import Row
from gpu_check.setting import Setting
from gpu_check.training import Task, Tenant, close, similar, train
from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec, PassItem

TENANTS = {
    ModelKey(1): Tenant("LoRA", LoraSpec(8, 1)),
    ModelKey(2): Tenant("LoRA without head", LoraSpec(16, 2, train_unembed=False)),
    ModelKey(3): Tenant("full", LoraSpec(0, 3)),
}
LENGTHS = (150, 1, 300, 33)
SMALL_LENGTHS = (60, 1, 200, 33)
TOKEN_BUDGET = 600


def checks(setting: Setting) -> list[Check]:
    names = ("tiny", "untied") if setting.small else ("tiny", "30M")
    return [Check(f"parity of {name}", partial(_parity, setting, name)) for name in names]


def _parity(setting: Setting, name: str) -> Iterator[Row]:
    items = _items(name, setting)
    with tempfile.TemporaryDirectory() as directory:
        alone(write_base, name, directory)
        on_cpu = setting.spec(directory, "float32", TOKEN_BUDGET, device="cpu")
        reference = train(Task(on_cpu, TENANTS, items))
        for dtype in ("float32", "bfloat16"):
            compare = close if dtype == "float32" else similar
            specs = (
                setting.spec(directory, dtype, TOKEN_BUDGET, ranks=setting.ranks, recompute=recompute)
                for recompute in (False, True)
            )
            kept, again = (train(Task(spec, TENANTS, items)) for spec in specs)
            yield from compare(f"{name}, {setting.device} {dtype} to cpu float32", kept, reference)
            yield from compare(f"{name}, {setting.device} {dtype}, recomputed or not", again, kept)


def _items(name: str, setting: Setting) -> list[PassItem]:
    lengths = SMALL_LENGTHS if setting.small else LENGTHS
    vocab = CONFIGS[name].vocab_size
    losses = {ModelKey(1): "cross_entropy", ModelKey(2): "cross_entropy", ModelKey(3): "importance_sampling"}
    items = [make_item(key, make_data(lengths, vocab, int(key)), loss) for key, loss in losses.items()]
    candidates = make_data(lengths[2:], vocab, 4, candidates=3)
    return [*items, *(make_item(key, candidates) for key in TENANTS)]
