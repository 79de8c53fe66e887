"""Inputs that each loss reads of a datum, as the SDK sends it."""

import numpy as np
import tinker
import torch
from tinker.types.provenance_spans import PromptProvenanceSpan, SampledProvenanceSpan

from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.domain.values import ForwardBackward, ProvenanceSpan
from tests.protocol.protobuf.test_pass_requests import datum, read, sdk_bytes

RL = {"target_tokens": [2, 3, 4], "logprobs": [-0.5, -0.25, -1.0], "advantages": [1.0, 0.0, -2.0]}


def custom(**inputs: object) -> ForwardBackward:
    return read(sdk_bytes([datum([1, 2, 3], **inputs)], "custom", config={"loss_id": "mine"}))


def test_a_custom_loss_gets_all_inputs_in_their_own_dtypes_and_shapes() -> None:
    sent = {
        "scalar": torch.tensor(0.5),
        "one": np.array([4], np.int64),
        "counts": torch.tensor([1, 2], dtype=torch.int32),
        "half": torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16),
        "table": np.arange(8, dtype=np.float32).reshape(4, 2),
        "none": np.zeros(0, np.float32),
        "weights": torch.eye(9, dtype=torch.int64),
    }
    value = custom(target_tokens=[2, 3, 4], **sent)
    assert (value.loss_fn, value.loss_id, value.loss_config) == ("custom", "mine", {})
    got = value.data[0].inputs
    assert {name: (array.dtype.name, array.shape) for name, array in got.items()} == {
        "scalar": ("float32", ()),
        "one": ("int64", (1,)),
        "counts": ("int64", (2,)),
        "half": ("float32", (3,)),
        "table": ("float32", (4, 2)),
        "none": ("float32", (0,)),
        "weights": ("int64", (9, 9)),
    }
    assert got["scalar"] == 0.5
    for name in ("one", "counts", "half", "table", "weights"):
        assert got[name].tolist() == torch.as_tensor(sent[name]).tolist()


def test_a_custom_loss_takes_candidates_and_casts_only_its_targets() -> None:
    value = custom(target_tokens=np.array([[2, 3]] * 3, np.float32), advantages=np.array([1, 0, 2]))
    assert value.data[0].target_tokens.dtype == np.int64
    assert value.data[0].target_tokens.tolist() == [[2, 3]] * 3
    assert value.data[0].inputs["advantages"].dtype == np.int64


def test_a_datum_of_one_token_has_no_scalars_but_for_custom_losses() -> None:
    one = datum([1], target_tokens=torch.tensor(2), weights=torch.tensor(0.5))
    first = read(sdk_bytes([one])).data[0]
    assert (first.target_tokens.tolist(), first.inputs["weights"].tolist()) == ([2], [0.5])
    custom_first = read(sdk_bytes([one], "custom", config={"loss_id": "x"})).data[0]
    assert custom_first.target_tokens.tolist() == [2]
    assert custom_first.inputs["weights"].shape == ()


def test_optional_inputs_are_there_only_when_sent() -> None:
    mask = [1.0, 0.0, 1.0]
    without, with_mask = read(
        sdk_bytes([datum([1, 2, 3], **RL), datum([1, 2, 3], **RL, sequence_ratio_mask=mask)], "gspo")
    ).data
    assert set(without.inputs) == {"logprobs", "advantages"}
    assert with_mask.inputs["sequence_ratio_mask"].tolist() == mask


def test_what_the_server_records_itself_is_not_taken_from_the_client() -> None:
    assert LOSSES["stable_reinforce"].recorded == ("sampling_logprobs", "sampled")
    spans = [
        PromptProvenanceSpan(sequence_id="a", offset=7, length=1),
        SampledProvenanceSpan(sequence_id="a", length=1),
        SampledProvenanceSpan(sequence_id="b", offset=3, length=1),
    ]
    sent = datum([1, 2, 3], **RL, sampled=np.ones(3, np.float32), sampling_logprobs=np.ones(3, np.float32))
    body = sdk_bytes(
        [sent.with_provenance(model_input=spans, loss_fn_inputs=spans)], "stable_reinforce", config={}
    )
    first = read(body).data[0]
    assert set(first.inputs) == {"advantages"}
    assert first.spans == (
        ProvenanceSpan("a", 7, 1, sampled=False),
        ProvenanceSpan("a", 0, 1, sampled=True),
        ProvenanceSpan("b", 3, 1, sampled=True),
    )


def test_dense_and_sparse_candidates_of_the_sdk_are_the_same_data() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.zeros(12, 20, dtype=torch.int64)
    targets[:, :3] = torch.randint(0, 50, (12, 3), generator=generator)
    weights = torch.zeros(12, 20)
    weights[:, :3] = torch.rand(12, 3, generator=generator)
    sparse = datum(list(range(12)), target_tokens=targets, weights=weights)
    dense = datum(list(range(12)), target_tokens=targets.numpy(), weights=weights.numpy())
    assert isinstance(sparse.loss_fn_inputs["weights"], tinker.TensorData)
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    assert dense.loss_fn_inputs["weights"].sparse_crow_indices is None
    for one in read(sdk_bytes([sparse, dense])).data:
        assert one.target_tokens.tobytes() == targets.numpy().tobytes()
        assert one.inputs["weights"].tobytes() == weights.numpy().tobytes()
        assert one.target_tokens.shape == one.inputs["weights"].shape == (12, 20)
