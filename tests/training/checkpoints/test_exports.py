"""Exports as others load them: by PEFT and by transformers, also through age."""

import errno
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyrage
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.manifest import read_manifest, verify_files
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.engine.saves.external_exports import Export, complete_export, finish_export
from skyrl_tinker.protocol import age_encryption
from skyrl_tinker.training.worker import Worker
from tests.support.peft_adapters import token_logprobs
from tests.training.conftest import MakeWorker
from tests.training.support.passes import make_data, make_item, perturb, run_one

KEY = ModelKey(1)
LORA, FULL = LoraSpec(8, 3), LoraSpec(0, 0)
DATA = make_data((30,), 50)
SHARD_BYTES = 100_000


def facts(directory: str) -> BaseModelFacts:
    names = ("org/tiny", directory)
    tied = json.loads(Path(directory, "config.json").read_text())["tie_word_embeddings"]
    return BaseModelFacts(directory, names, "Qwen3ForCausalLM", 512, 128, 2, 2, 32, 64, tied, (0,))


@pytest.fixture
def base(untied_model: str, tmp_path: Path) -> str:
    """With what a base model has beside its weights."""
    directory = tmp_path / "base"
    shutil.copytree(untied_model, directory)
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "LICENSE",
        "README.md",
        "old.bin",
        "old.index.json",
    ):
        (directory / name).write_text("{}")
    return str(directory)


def export(worker: Worker, spec: LoraSpec, directory: Path, recipients: Sequence[str] = ()) -> int:
    """Of a model that has been moved away from the base. Returns its size."""
    worker.create_model(KEY, spec)
    perturb(worker, KEY)
    staging, scratch = directory.with_name("staging"), directory.with_name("scratch")
    worker.capture_export(KEY, 0, SHARD_BYTES)
    worker.write_state(0, str(scratch), str(staging))
    what = Export(facts(worker.spec.directory), spec, worker.spec.dtype, recipients)
    return finish_export(what, complete_export(what, staging), staging, directory)


def logprobs(worker: Worker) -> np.ndarray:
    (found,) = run_one(worker, make_item(KEY, DATA, backward=False)).logprobs
    return found


def assert_same(model: torch.nn.Module, worker: Worker, atol: float = 1e-4) -> None:
    (datum,) = DATA
    expected = token_logprobs(model, datum.tokens.tolist(), datum.target_tokens.tolist())
    np.testing.assert_allclose(logprobs(worker), expected.numpy(), atol=atol, rtol=0)


def names(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()}


def test_peft_loads_a_lora_export_which_names_the_base_by_its_name(
    make_worker: MakeWorker, base: str, tmp_path: Path
) -> None:
    worker = make_worker(base)
    size = export(worker, LORA, tmp_path / "e")
    files = {"adapter_config.json", "adapter_model.safetensors"}
    assert names(tmp_path / "e") == files | {"manifest.json"}
    assert size == sum((tmp_path / "e" / name).stat().st_size for name in files)
    config = json.loads((tmp_path / "e" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/tiny"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert_same(PeftModel.from_pretrained(model, str(tmp_path / "e")), worker)


# PEFT warns, too: of what the export warns of.
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("head", [True, False])
def test_an_export_warns_where_a_merge_by_peft_makes_another_model(
    make_worker: MakeWorker, tied_model: str, tmp_path: Path, head: bool
) -> None:
    worker = make_worker(tied_model)
    export(worker, replace(LORA, train_unembed=head), tmp_path / "e")
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, str(tmp_path / "e"))
    assert_same(adapted, worker)
    merged = adapted.merge_and_unload()
    if not head:
        assert_same(merged, worker)
        assert "MERGING.md" not in names(tmp_path / "e")
        return
    with pytest.raises(AssertionError):
        assert_same(merged, worker)
    assert "merge_and_unload" in (tmp_path / "e" / "MERGING.md").read_text()
    assert "MERGING.md" in read_manifest(tmp_path / "e").files


def test_transformers_loads_a_full_export_in_shards_with_what_else_the_base_has(
    make_worker: MakeWorker, base: str, tmp_path: Path
) -> None:
    worker = make_worker(base)
    export(worker, FULL, tmp_path / "e")
    shards = list((tmp_path / "e").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert max(shard.stat().st_size for shard in shards) < 2 * SHARD_BYTES
    others = names(tmp_path / "e") - {shard.name for shard in shards}
    assert others == {
        "manifest.json",
        "model.safetensors.index.json",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "LICENSE",
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "e")
    assert loaded.dtype == torch.float32
    assert_same(loaded, worker)


def test_full_weights_have_the_trainers_dtype_and_their_config_says_so(
    make_worker: MakeWorker, base: str, tmp_path: Path
) -> None:
    worker = make_worker(base)
    worker.spec = replace(worker.spec, dtype="bfloat16")
    export(worker, FULL, tmp_path / "e")
    config = json.loads((tmp_path / "e" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    for shard in (tmp_path / "e").glob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(shard).values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "e").dtype == torch.bfloat16


@pytest.mark.parametrize("spec", [LORA, FULL], ids=["lora", "full"])
def test_an_encrypted_export_has_nothing_that_can_be_read_and_any_recipient_decrypts_it(
    make_worker: MakeWorker, base: str, tmp_path: Path, spec: LoraSpec
) -> None:
    identities = [pyrage.x25519.Identity.generate() for _ in range(2)]
    worker = make_worker(base)
    size = export(worker, spec, tmp_path / "e", [str(each.to_public()) for each in identities])
    found = names(tmp_path / "e") - {"manifest.json"}
    assert all(name.endswith(age_encryption.SUFFIX) for name in found)
    manifest = read_manifest(tmp_path / "e")
    assert set(manifest.files) == found
    assert size == sum(entry.size for entry in manifest.files.values())
    verify_files(tmp_path / "e", manifest, manifest.files)
    for identity in identities:
        plain = tmp_path / str(identities.index(identity))
        plain.mkdir()
        for name in found:
            source, target = tmp_path / "e" / name, plain / name.removesuffix(age_encryption.SUFFIX)
            pyrage.decrypt_file(str(source), str(target), [identity])
    if spec is FULL:
        assert_same(AutoModelForCausalLM.from_pretrained(plain), worker)
    else:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        assert_same(PeftModel.from_pretrained(model, str(plain)), worker)


@pytest.mark.parametrize("size", [6, 30_000, 100_000])
def test_a_disk_that_is_full_at_the_last_byte_is_told(tmp_path: Path, size: int) -> None:
    """pyrage says nothing of its last write, which is the only one of a small file."""
    plain = tmp_path / "a"
    plain.write_bytes(bytes(size))
    (tmp_path / age_encryption.PARTIAL).symlink_to("/dev/full")
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(OSError, match="No space left on device") as full:
        age_encryption.encrypt(plain, [recipient])
    assert full.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == [plain], "the disk stays full no longer than the try"
