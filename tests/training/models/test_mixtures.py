"""Experts on a CPU: to the bit whatever shares the row, and the same on ranks that hold some of them each."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, DimuonParams, LoraSpec, PassOutput, StepItem
from skyrl_tinker.errors import StartupError, UserError
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory.row_profile import FakeTrainer, Training
from skyrl_tinker.training.models.expert_layers import _ApartProduct, _Group
from skyrl_tinker.training.models.mixtures import Piece, find_pieces
from skyrl_tinker.training.trainer_group import TrainerGroup
from skyrl_tinker.training.trainer_spec import TrainerSpec
from tests.training.conftest import MakeWorker
from tests.training.support.passes import (
    assert_close,
    assert_equal,
    gradients_of,
    make_data,
    make_item,
    run_one,
    run_pass,
)
from tests.training.support.saves import publish_weights, read_weights

SPECS = {1: LoraSpec(8, 1), 2: LoraSpec(1, 2, train_attn=False), 3: LoraSpec(6, 3, train_mlp=False)}
SHAPE = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
EXPERTS = "model.layers.0.mlp.experts"
LORA, FULL = ModelKey(1), ModelKey(9)


@pytest.fixture(params=["mixture_model", "whole_mixture_model"])
def each_mixture(request: pytest.FixtureRequest) -> str:
    directory: str = request.getfixturevalue(request.param)
    return directory


@pytest.mark.parametrize("budget", [64, 4096])
def test_a_request_gets_to_the_bit_what_it_gets_alone(
    make_worker: MakeWorker, each_mixture: str, budget: int
) -> None:
    items = [
        make_item(model, make_data(lengths, 10 * model + turn), seq_id=turn)
        for turn, lengths in enumerate([(40, 3, 17), (60,)])
        for model in (2, 1, 3)
    ]
    together, apart = (make_worker(each_mixture, budget, models=SPECS) for _ in range(2))
    for item, output in zip(items, run_pass(together, *items), strict=True):
        assert isinstance(output, PassOutput)
        for found, expected in zip(output.logprobs, run_one(apart, item).logprobs, strict=True):
            np.testing.assert_array_equal(found, expected)
    for model in SPECS:
        assert_equal(gradients_of(together, model), gradients_of(apart, model))


def test_experts_share_the_rank(make_worker: MakeWorker, mixture_model: str) -> None:
    shapes = make_worker(mixture_model, 64, models=SPECS)._models[LORA].shapes()
    layer = "base_model.model.model.layers.1"
    assert shapes[f"{layer}.self_attn.q_proj.lora_A.weight"] == (8, 64)
    assert shapes[f"{layer}.mlp.experts.6.gate_proj.lora_A.weight"] == (4, 64)
    assert shapes[f"{layer}.mlp.experts.6.down_proj.lora_B.weight"] == (64, 4)
    assert not [name for name in shapes if ".mlp.gate." in name], "the router stays as it is"


async def _trained(
    directory: str, ranks: int, path: Path, params: AdamParams | DimuonParams
) -> dict[str, torch.Tensor]:
    """Train an adapter and all parameters, save and load these on the way, and return what samplers get."""
    group = TrainerGroup.launch(TrainerSpec(directory, ranks, "cpu", "float32", 1, 64, timeout_s=60.0))
    try:
        await group.ready()
        for model, spec in ((LORA, SPECS[1]), (FULL, LoraSpec(0, 0))):
            await group.create_model(model, spec, params.family)
        for number in range(3):
            items = [make_item(model, make_data((40, 9, 30), number)) for model in (LORA, FULL)]
            outputs = (await group.run_pass(group.prepare(items))).outputs
            assert all(isinstance(output, PassOutput) for output in outputs), outputs
            await group.optim_step([StepItem(RequestId("s"), model, params) for model in (LORA, FULL)])
            captured = await group.capture_state(FULL, optimizer=True)
            await captured.persist(str(path / f"saved-{number}"))
            await captured.drop()
            await group.load_state(FULL, str(path / f"saved-{number}"), optimizer=True)
        found = {}
        for model in (LORA, FULL):
            await publish_weights(group, model, path / f"weights-{model}")
            found |= read_weights(path / f"weights-{model}")
        return {name: torch.tensor(array) for name, array in found.items()}
    finally:
        await group.shutdown()


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "params"),
    [
        # With a smaller eps, one rank with rows of another length is off by as much: rounding in float32.
        ("mixture_model", AdamParams(1e-2, eps=1e-2)),
        ("mixture_model", DimuonParams(0.02)),
        # Its gradients are up to 60: with a smaller eps, those of 1e-4 would make steps as large.
        ("whole_mixture_model", AdamParams(1e-2, eps=1.0)),
    ],
)
def test_two_ranks_equal_one(
    request: pytest.FixtureRequest,
    ray_cluster: None,
    model: str,
    tmp_path: Path,
    params: AdamParams | DimuonParams,
) -> None:
    directory = request.getfixturevalue(model)
    one, two = (asyncio.run(_trained(directory, ranks, tmp_path / str(ranks), params)) for ranks in (1, 2))
    assert_close(two, one, 1e-5)


def test_files_of_experts_in_one_tensor_have_peft_s_shapes(
    make_worker: MakeWorker, whole_mixture_model: str
) -> None:
    """A of all experts is [experts * r, in], B [out, r * experts], with r = 8 // 4."""
    shapes = make_worker(whole_mixture_model, 64, models=SPECS)._models[LORA].shapes()
    experts = "base_model.model.model.layers.1.mlp.experts"
    assert {name: shape for name, shape in shapes.items() if name.startswith(experts)} == {
        f"{experts}.base_layer.lora_A.weight": (14, 64),
        f"{experts}.base_layer.lora_B.weight": (128, 14),
        f"{experts}.lora_A.weight": (14, 64),
        f"{experts}.lora_B.weight": (64, 14),
    }


@pytest.mark.parametrize("rank", [8, 0])
def test_dimuon_is_refused_where_a_tensor_has_many_matrices(
    make_worker: MakeWorker, whole_mixture_model: str, rank: int
) -> None:
    worker = make_worker(whole_mixture_model)
    with pytest.raises(UserError, match="optimizer dimuon: expected adamw for this base model"):
        worker.create_model(ModelKey(1), LoraSpec(rank, 0), "dimuon")


def test_a_missing_expert_is_named(make_worker: MakeWorker, mixture_model: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixture_model)
    model.save_pretrained(tmp_path)
    weights = read_weights(tmp_path)
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    from safetensors.numpy import save_file

    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"no tensor model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        make_worker(str(tmp_path))


def test_experts_that_are_one_tensor_in_files_have_no_pieces() -> None:
    with torch.device("meta"):
        split = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE, num_experts=2))
        whole = AutoModelForCausalLM.from_config(GptOssConfig(**SHAPE, num_local_experts=2))
    found = find_pieces(split)
    assert list(found) == [f"{EXPERTS}.{matrix}" for matrix in ("gate_up_proj", "down_proj")]
    names = [piece.name for piece in found[f"{EXPERTS}.gate_up_proj"]]
    assert names == [f"{EXPERTS}.{e}.{leaf}_proj.weight" for e in (0, 1) for leaf in ("gate", "up")]
    assert find_pieces(whole) == {}


@pytest.mark.parametrize("recompute", [pytest.param(0, marks=pytest.mark.long), 1, 2])
@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bfloat16"), ("cpu", "float32")])
@pytest.mark.parametrize("rank", [8, 0])
def test_a_mixture_is_planned_without_weights(
    ranks: Ranks, each_mixture: str, rank: int, device: str, dtype: str, recompute: int
) -> None:
    config = json.loads((Path(each_mixture) / "config.json").read_text())
    training = Training(config, device, dtype, LoraSpec(rank, 0))
    found = FakeTrainer(training, ranks).measure(256, recompute=recompute)
    assert device == "cpu" or found.reads == 0
    assert found.peak > found.saved > 0


def test_bfloat16_adds_the_gradients_of_experts_in_float32() -> None:
    """Sequence by sequence, in bfloat16, small addends would be lost."""
    torch.manual_seed(0)
    x, weight = torch.randn(4096, 8).bfloat16(), torch.randn(1, 4, 8).bfloat16().requires_grad_()
    dy = torch.randn(4096, 4).bfloat16()
    _ApartProduct.apply(x, weight, None, [_Group(0, 0, 16)] * 256, [{}]).backward(dy)
    expected = dy.float().T @ x.float()
    assert weight.grad is not None
    assert float((weight.grad[0] - expected).norm() / expected.norm()) < 0.004


def test_a_rank_past_the_last_expert_has_a_share_of_nothing() -> None:
    piece = Piece("mlp.experts.0.down_proj.weight", "mlp.experts.down_proj", 0, slice(0, 6), (6, 4))
    stacked = torch.randn(1, 6, 4)
    assert piece.of(stacked).equal(stacked[0])
    assert piece.of(stacked[:0], 1).shape == (0, 4)
    assert piece.of(stacked, 1).shape == (0, 4), "of another rank"
