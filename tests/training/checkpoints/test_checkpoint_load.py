"""Checkpoints of real ranks: written side by side, loaded on any number, and while training goes on."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.manifest import read_manifest
from skyrl_tinker.domain.values import (
    AdamParams,
    DimuonParams,
    LoraSpec,
    OptimizerFamily,
    PassOutput,
    StepItem,
)
from skyrl_tinker.errors import StorageError, UserError
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from tests.support.failures import files_up_to
from tests.training.support import reference
from tests.training.support.passes import assert_close, assert_equal, make_data, make_item
from tests.training.support.saves import save_state

pytestmark = pytest.mark.long

Groups = dict[int, TrainerGroup]
Tensors = dict[str, torch.Tensor]

KEY, COPY = ModelKey(1), ModelKey(2)
LORA, FULL = LoraSpec(8, 1), LoraSpec(0, 0)
KINDS: list[tuple[LoraSpec, OptimizerFamily]] = [
    (LORA, "adamw"),
    (LORA, "dimuon"),
    (FULL, "adamw"),
    (FULL, "dimuon"),
]
PARAMS = {"adamw": AdamParams(1e-2, weight_decay=0.1, eps=1e-3), "dimuon": DimuonParams(1e-2)}


@pytest.fixture(scope="module")
def started(ray_cluster: None, untied_model: str) -> Iterator[Groups]:
    """By number of ranks, started side by side."""
    groups = {
        ranks: TrainerGroup.launch(TrainerSpec(untied_model, ranks, "cpu", "float32", 1, 64))
        for ranks in (1, 2, 4)
    }
    for group in groups.values():
        asyncio.run(group.ready())
    yield groups
    for group in groups.values():
        asyncio.run(group.shutdown())


@pytest.fixture
async def groups(started: Groups) -> AsyncIterator[Groups]:
    yield started
    for group in started.values():
        for model in (KEY, COPY):
            await group.release(model)


async def _train(
    group: TrainerGroup, optimizer: OptimizerFamily, seed: int, model: ModelKey = KEY
) -> list[np.ndarray]:
    """One step; the logprobs before it."""
    item = make_item(model, make_data((40, 30, 9, 50), seed))
    (output,) = (await group.run_pass(group.prepare([item]))).outputs
    assert isinstance(output, PassOutput), output
    (step,) = await group.optim_step([StepItem(RequestId("s"), model, PARAMS[optimizer])])
    assert step.error is None
    return list(output.logprobs)


def _tensors(directory: Path) -> Tensors:
    """All that a checkpoint holds, by file stem and key."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        stem = file.name.split("-")[0].removesuffix(".safetensors")
        found |= {f"{stem}/{key}": tensor for key, tensor in load_file(file).items()}
    return found


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(("spec", "optimizer"), KINDS)
async def test_saved_on_two_ranks_training_goes_on_alike_on_one_two_and_four(
    groups: Groups, tmp_path: Path, spec: LoraSpec, optimizer: OptimizerFamily
) -> None:
    two = groups[2]
    await two.create_model(KEY, spec, optimizer)
    for seed in range(2):
        await _train(two, optimizer, seed)
    await save_state(two, KEY, str(tmp_path / "saved"), optimizer=True)
    logprobs = await _train(two, optimizer, 2)
    await save_state(two, KEY, str(tmp_path / "after"), optimizer=True)
    for ranks, group in groups.items():
        await group.create_model(COPY, spec, optimizer)
        await group.load_state(COPY, str(tmp_path / "saved"), optimizer=True)
        await save_state(group, COPY, str(tmp_path / f"loaded{ranks}"), optimizer=True)
        assert_equal(_tensors(tmp_path / f"loaded{ranks}"), _tensors(tmp_path / "saved"))
        again = await _train(group, optimizer, 2, COPY)
        await save_state(group, COPY, str(tmp_path / f"after{ranks}"), optimizer=True)
        tolerance = 0.0 if ranks == 2 else 1e-6
        assert_close(_tensors(tmp_path / f"after{ranks}"), _tensors(tmp_path / "after"), tolerance)
        assert read_manifest(tmp_path / f"after{ranks}").step == 3
        for found, expected in zip(again, logprobs, strict=True):
            np.testing.assert_allclose(found, expected, atol=0 if ranks == 2 else 1e-5, rtol=0)


async def test_ranks_write_their_shares_as_hugging_face_lays_them_out(
    groups: Groups, untied_model: str, tmp_path: Path
) -> None:
    await groups[4].create_model(KEY, FULL)
    await _train(groups[4], "adamw", 0)
    saved = tmp_path / "c"
    size = await save_state(groups[4], KEY, str(saved), optimizer=True)
    assert size == sum(file.stat().st_size for file in saved.iterdir())
    shards = [f"{stem}-0000{i}-of-00004.safetensors" for stem in ("model", "optimizer") for i in (1, 2, 3, 4)]
    assert _names(saved) == sorted([*shards, "model.safetensors.index.json", "manifest.json"])
    sizes = [(saved / name).stat().st_size for name in shards[:4]]
    assert max(sizes) < 2 * min(sizes)
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    for name, shard in index["weight_map"].items():
        assert name in load_file(saved / shard)
    shutil.copy(Path(untied_model, "config.json"), saved)
    weights = {name.removeprefix("model/"): tensor for name, tensor in _tensors(saved).items()}
    for name, parameter in reference.load(str(saved)).named_parameters():
        assert torch.equal(parameter, weights[name]), name


async def test_training_goes_on_while_a_save_is_written(groups: Groups, tmp_path: Path) -> None:
    two = groups[2]
    await two.create_model(KEY, FULL)
    await _train(two, "adamw", 0)
    await save_state(two, KEY, str(tmp_path / "now"), optimizer=True)
    captured = await two.capture_state(KEY, optimizer=True)
    late = await two.capture_state(KEY, optimizer=True)
    persisted = asyncio.create_task(two.persist_state(captured, str(tmp_path / "beside")))
    for seed in range(1, 4):
        await _train(two, "adamw", seed)
    await two.release(KEY)
    await persisted
    await two.persist_state(late, str(tmp_path / "late"))
    for name in ("beside", "late"):
        assert read_manifest(tmp_path / name) == read_manifest(tmp_path / "now"), name  # checksums and all
    assert _names(tmp_path) == ["beside", "late", "now"]


async def test_a_rank_that_cannot_write_is_named_and_nothing_is_left(groups: Groups, tmp_path: Path) -> None:
    two = groups[2]
    await two.create_model(KEY, FULL)
    refused = pytest.raises(StorageError, match=r"^rank 1 could not write the checkpoint: File too large$")
    with files_up_to(100_000, two.pids()[1]), refused:
        await save_state(two, KEY, str(tmp_path / "c"), optimizer=True)
    assert _names(tmp_path) == []
    await _train(two, "adamw", 0)
    assert await save_state(two, KEY, str(tmp_path / "c"), optimizer=True) > 100_000


async def test_a_name_that_is_taken_is_refused_and_nothing_is_left(groups: Groups, tmp_path: Path) -> None:
    await groups[1].create_model(KEY, LORA)
    await save_state(groups[1], KEY, str(tmp_path / "c"), optimizer=True)
    with pytest.raises(UserError, match="the directory exists"):
        await save_state(groups[1], KEY, str(tmp_path / "c"), optimizer=True)
    assert _names(tmp_path) == ["c"]


async def test_damage_is_named_whichever_rank_checks_the_file_and_changes_no_rank(
    groups: Groups, tmp_path: Path
) -> None:
    group = groups[2]
    await group.create_model(KEY, FULL)
    await _train(group, "adamw", 0)
    await save_state(group, KEY, str(tmp_path / "c"), optimizer=True)
    await _train(group, "adamw", 1)
    await save_state(group, KEY, str(tmp_path / "before"), optimizer=True)
    for file in sorted((tmp_path / "c").glob("*.safetensors")):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UserError, match=f"is damaged: {file.name}"):
            await group.load_state(KEY, str(tmp_path / "c"), optimizer=True)
        file.write_bytes(content)
    await save_state(group, KEY, str(tmp_path / "after"), optimizer=True)
    assert read_manifest(tmp_path / "after") == read_manifest(tmp_path / "before")


@pytest.mark.parametrize("spec", [LORA, FULL], ids=["lora", "full"])
async def test_an_export_of_two_ranks_has_the_weights_of_the_checkpoint_in_more_files(
    groups: Groups, tmp_path: Path, spec: LoraSpec
) -> None:
    await groups[2].create_model(KEY, spec)
    await _train(groups[2], "adamw", 1)
    await save_state(groups[2], KEY, str(tmp_path / "c"), optimizer=False)
    captured = await groups[2].capture_export(KEY, 100_000)
    await groups[2].persist_state(captured, str(tmp_path / "e"))
    assert_equal(_tensors(tmp_path / "e"), _tensors(tmp_path / "c"))
    shards = list((tmp_path / "e").glob("*.safetensors"))
    assert len(shards) > 2 if spec is FULL else len(shards) == 1
    if spec is FULL:
        index = json.loads((tmp_path / "e" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {shard.name for shard in shards}
