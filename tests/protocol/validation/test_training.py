"""Errors in a forward_backward, each with the message that the user reads."""

import re

import numpy as np
import pytest

from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.validation.training import check_config, find_loss
from tests.protocol.support.messages import (
    SPANS,
    TARGETS,
    WEIGHTS,
    Change,
    config,
    csr,
    put,
    request,
    spans,
    tensor,
    tokens,
    validate,
)

WRONG: list[tuple[Change, str]] = [
    (lambda m: m.ClearField("data"), "data is empty, expected at least one datum"),
    (lambda m: m.data.extend([m.data[0]] * 2), "data has 4 datums, expected at most 3"),
    (
        lambda m: m.data[1].ClearField("model_input"),
        "datum 1: model_input is empty, expected at least one token",
    ),
    (tokens(1, 2, 3, 4, 5), r"datum 1: model_input .* at most 4 \(.* context_length of base model tiny\)"),
    (tokens(1, 10, 3), r"datum 1: model_input\[1\] is 10, expected a token id in \[0, 10\)"),
    (tokens(1, 2, -1), r"datum 1: model_input\[2\] is -1, expected a token id in \[0, 10\)"),
    (
        lambda m: setattr(m.data[1].model_input[0].encoded_text, "tokens", b"12345"),
        r"datum 1: model_input has 5 bytes, expected a multiple of 4",
    ),
    (
        put("target_tokens", tensor([2, 3, 10], np.int64)),
        TARGETS + r"\[2\] is 10, expected a token id in \[0, 10\)",
    ),
    (
        put("target_tokens", tensor([-100, 3, 4], np.int64)),
        TARGETS + r"\[0\] is -100, expected a token id in \[0, 10\)",
    ),
    (put("target_tokens", tensor([2, 3.5, 4])), TARGETS + r"\[1\] is 3.5, expected an integer"),
    (put("target_tokens", tensor([2, np.nan, 4])), TARGETS + r"\[1\] is nan, expected an integer"),
    (put("target_tokens", tensor([2, np.inf, 4])), TARGETS + r"\[1\] is inf, expected an integer"),
    (
        put("target_tokens", tensor([2, 3], np.int64)),
        TARGETS + r" has length 2, expected 3 \(the length of model_input\)",
    ),
    (
        put("target_tokens", tensor([[2, 3]] * 2, np.int64, (2, 2))),
        TARGETS + r" has length 2, expected 3 \(the length of model_input\)",
    ),
    (
        put("target_tokens", tensor([[2, 3]] * 3, np.int64, (3, 3))),
        TARGETS + r" has 6 values, expected 9 \(its shape \[3, 3\]\)",
    ),
    (
        put("target_tokens", tensor([[2, 3], [4, 5], [6, 10]], np.int64, (3, 2))),
        TARGETS + r"\[2, 1\] is 10, expected a token id in \[0, 10\)",
    ),
    (
        put("target_tokens", tensor([2] * 6, np.int64, (3, 2, 1))),
        TARGETS + r" has shape \[3, 2, 1\], expected \[N\], or \[N, K\] with both of at least 1",
    ),
    (
        put("target_tokens", tensor([], np.int64, (3, 0))),
        TARGETS + r" has shape \[3, 0\], expected \[N\], or \[N, K\] with both of at least 1",
    ),
    (
        put("target_tokens", tensor([1, 2, 3], np.int64, (-3, -1))),
        TARGETS + r" has shape \[-3, -1\], expected \[N\], or \[N, K\] with both of at least 1",
    ),
    (
        put("target_tokens", tensor([[2, 3]] * 3, np.int64, (3, 2))),
        WEIGHTS + r" has shape \[3\], expected \[3, 2\] \(that of target_tokens\)",
    ),
    (
        put("weights", tensor([1, 2, 3, 4])),
        WEIGHTS + r" has shape \[4\], expected \[3\] \(that of target_tokens\)",
    ),
    (put("weights", tensor([])), WEIGHTS + r" has shape \[0\], expected \[3\] \(that of target_tokens\)"),
    (
        put("weights", tensor([1, 2, 3], shape=(3, 1))),
        WEIGHTS + r" has shape \[3, 1\], expected \[3\] \(that of target_tokens\)",
    ),
    (
        put("weights", csr([1], [0, 1, 1, 1], [1], (3, 2))),
        WEIGHTS + r" has shape \[3, 2\], expected \[3\] \(that of target_tokens\)",
    ),
    (put("weights", tensor([1, np.nan, 3])), WEIGHTS + r"\[1\] is nan, expected a finite number"),
    (put("weights", tensor([1, 2, -np.inf])), WEIGHTS + r"\[2\] is -inf, expected a finite number"),
    (
        put("weights", tensor([1, 2, 3], shape=(4,))),
        WEIGHTS + r" has 3 values, expected 4 \(its shape \[4\]\)",
    ),
    (
        put("weights", pb.Tensor(dense=b"12", dtype=pb.DTYPE_FLOAT32)),
        WEIGHTS + r" has 2 bytes, expected a multiple of 4 \(float32\)",
    ),
    (
        put("weights", pb.Tensor(dense=b"12", dtype=pb.DTYPE_BFLOAT16)),
        WEIGHTS + " has dtype number 4, expected float32, int64 or int32",
    ),
    (put("weights", pb.Tensor()), WEIGHTS + " has dtype number 0, expected float32, int64 or int32"),
    (
        lambda m: m.data[1].loss_fn_inputs["weight"].CopyFrom(m.data[1].loss_fn_inputs.pop("weights")),
        "datum 1: loss_fn_inputs has 'weight', which cross_entropy does not read, and no 'weights', "
        "expected that, or target_tokens alone",
    ),
    (lambda m: m.data[1].loss_fn_inputs.clear(), "datum 1: loss_fn_inputs lacks 'target_tokens', found none"),
]


def test_weights_of_cross_entropy_may_be_left_out() -> None:
    message = request()
    message.data[1].loss_fn_inputs.pop("weights")
    first, second = validate(message).data
    assert (set(first.inputs), set(second.inputs)) == ({"weights"}, set())


def test_inputs_that_cross_entropy_does_not_read_are_accepted_beside_its_weights() -> None:
    message = request()
    put("mask", tensor([1.0]))(message)
    assert set(validate(message).data[1].inputs) == {"weights"}


def rl_request(loss: str, **inputs: pb.Tensor) -> pb.ForwardBackwardRequest:
    message = request(loss)
    for name, values in {"logprobs": tensor([-1, -2, -3]), "advantages": tensor([0, 1, 1]), **inputs}.items():
        for each in message.data:
            each.loss_fn_inputs[name].CopyFrom(values)
    for each in message.data:
        for name in ("weights", "sequence_ratio_mask"):
            each.loss_fn_inputs.pop(name, None)
    return message


def test_a_forward_takes_datums_of_other_losses_as_it_trains_nothing() -> None:
    message = rl_request("cross_entropy")
    with pytest.raises(UserError, match="datum 0: loss_fn_inputs has 'advantages', which cross_entropy does"):
        validate(message)
    message.forward_only = True
    assert [set(datum.inputs) for datum in validate(message).data] == [set(), set()]


@pytest.mark.parametrize(
    ("loss", "name", "said"),
    [
        ("ppo", "clip_low_threshold", "expected one for all tokens, in loss_fn_config"),
        ("dro", "beta", "expected one for all tokens, in loss_fn_config"),
        ("gspo", "mask", "which gspo does not read, and no 'sequence_ratio_mask', expected that, or target"),
    ],
)
def test_inputs_by_which_something_else_would_be_trained_are_refused(loss: str, name: str, said: str) -> None:
    with pytest.raises(UserError, match=f"datum 0: loss_fn_inputs has '{name}', {said}"):
        validate(rl_request(loss, **{name: tensor([0, 1, 1])}))
    validate(rl_request(loss))


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(change: Change, message: str) -> None:
    wrong = request()
    change(wrong)
    with pytest.raises(UserError, match=f"^{message}"):
        validate(wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: setattr(m.data[1].model_input.add().image, "format", "png"),
            "datum 1: model_input chunk 1 is of kind image",
        ),
        (
            lambda m: setattr(m.data[1].model_input.add().dmel, "dmel", b"x"),
            "datum 1: model_input chunk 1 is of kind dmel",
        ),
        (lambda m: m.data[1].model_input.add(), "datum 1: model_input chunk 1 is of kind empty"),
    ],
)
def test_what_is_not_built_yet_is_refused_as_such(change: Change, message: str) -> None:
    wrong = request()
    change(wrong)
    with pytest.raises(NotSupportedError, match=message):
        validate(wrong)


def test_a_full_context_any_finite_weights_and_thresholds_that_meet_are_fine() -> None:
    message = request("ppo")
    config(clip_low_threshold=1.0, clip_high_threshold=1.0)(message)
    assert validate(message).loss_config == {"clip_high_threshold": 1.0, "clip_low_threshold": 1.0}
    full = request()
    tokens(1, 2, 3, 0)(full)
    put("target_tokens", tensor([2, 3, 0, 9], np.int64))(full)
    put("weights", tensor([0, 0, -1e30, 1e-30]))(full)
    assert validate(full).data[1].tokens.tolist() == [1, 2, 3, 0]


def test_validation_leaves_the_request_as_it_was() -> None:
    message = request("ppo")
    before = message.SerializeToString(deterministic=True)
    validate(message)
    assert message.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "gspo", "stable_reinforce", "clip_cov"])
@pytest.mark.parametrize("width", [1, 2])
def test_candidates_are_refused_by_losses_of_one_target(loss_fn: str, width: int) -> None:
    wrong = request(loss_fn)
    put("target_tokens", tensor([[2] * width] * 3, np.int64, (3, width)))(wrong)
    with pytest.raises(
        UserError, match=rf"has shape \[3, {width}\], expected \[3\]: loss {loss_fn} takes one target"
    ):
        validate(wrong)


def test_candidates_come_dense_or_sparse_and_their_weights_the_other_way_round() -> None:
    message = request()
    put("target_tokens", tensor([[2, 3], [0, 0], [4, 0]], np.int64, (3, 2)))(message)
    put("weights", csr([0.5, -1.0], [0, 1, 1, 2], [1, 0], (3, 2)))(message)
    first, second = validate(message).data
    assert first.target_tokens.tolist() == [2, 3, 4]
    assert second.target_tokens.tolist() == [[2, 3], [0, 0], [4, 0]]
    assert second.inputs["weights"].tolist() == [[0.0, 0.5], [0.0, 0.0], [-1.0, 0.0]]
    put("target_tokens", csr([9, 8], [0, 0, 2, 2], [0, 1], (3, 2), np.int64))(message)
    put("weights", tensor([1, 2, 3, 4, 5, 6], shape=(3, 2)))(message)
    second = validate(message).data[1]
    assert second.target_tokens.tolist() == [[0, 0], [9, 8], [0, 0]]
    assert second.inputs["weights"].tolist() == [[1, 2], [3, 4], [5, 6]]


def empty(rows: int, columns: int) -> pb.Tensor:
    """Return a sparse tensor that takes no more bytes than its crow_indices."""
    return csr([], [0] * (min(rows, 9) + 1), [], (rows, columns))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("weights", empty(3, 10**12)), WEIGHTS + f" has {3 * 10**12} values, expected at most 16"),
        (put("target_tokens", empty(3, 2**62)), TARGETS + f" has {3 * 2**62} values, expected at most 16"),
        (put("target_tokens", empty(2**62, 2**62)), TARGETS + f" has {2**124} values, expected at most 16"),
        (
            put("target_tokens", tensor([[1] * 5] * 3, np.int64, (3, 5))),
            "data has 18 target_tokens, expected at most 16 in one request",
        ),
    ],
)
def test_more_targets_than_a_request_may_have_are_never_made(change: Change, message: str) -> None:
    wrong = request()
    change(wrong)
    with pytest.raises(UserError, match=f"^{message}"):
        validate(wrong)


def test_inputs_of_a_custom_loss_are_bounded_together() -> None:
    message = request("custom")
    for name in "abcd":
        put(name, empty(4, 4))(message)
    with pytest.raises(UserError, match="loss_fn_inputs hold 70 values, expected at most 64 in one request"):
        validate(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            spans(),
            "datum 1: loss_fn stable_reinforce needs provenance spans: sample with record_stability_info "
            "and build the datum with Datum.with_provenance",
        ),
        (spans(("a", 0, 2, True)), SPANS + r" cover 2 positions, expected 3 \(the length of target_tokens\)"),
        (spans(("a", 0, 2, True), ("b", 0, 2, False)), SPANS + " cover 4 positions, expected 3"),
        (
            spans(("a", 0, 2, True), ("", 0, 1, False)),
            SPANS + r"\[1\].sequence_id is empty, expected the sequence_id of a sampled sequence",
        ),
        (spans(("a", -1, 3, True)), SPANS + r"\[0\].offset is -1, expected at least 0"),
        (spans(("a", 0, 4, True), ("a", 0, -1, False)), SPANS + r"\[1\].length is -1, expected at least 0"),
        (
            lambda m: m.data[1].loss_fn_input_spans.add(),
            SPANS + r"\[2\] is empty, expected prompt_tokens or sampled_tokens",
        ),
    ],
)
def test_spans_that_do_not_tile_the_targets_are_named(change: Change, message: str) -> None:
    wrong = request("stable_reinforce")
    change(wrong)
    with pytest.raises(UserError, match=f"^{message}"):
        validate(wrong)


def test_spans_of_losses_without_records_stay_unread() -> None:
    message = request("ppo")
    spans(("", -1, 99, True))(message)
    assert validate(message).data[1].spans == ()


def test_a_custom_loss_may_read_what_is_not_finite_and_of_any_length() -> None:
    message = request("custom")
    put("floor", tensor([-np.inf] * 5))(message)
    assert validate(message).data[1].inputs["floor"].tolist() == [-np.inf] * 5


# loss_fn and loss_fn_config


def test_an_unknown_loss_is_answered_with_all_that_are_known() -> None:
    wrong = request("dpo")
    with pytest.raises(UserError, match=f"^loss_fn is 'dpo', expected one of {', '.join(LOSSES)}$"):
        validate(wrong)


@pytest.mark.parametrize("name", ["critic", "value", "value_clip"])
def test_losses_of_a_critic_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UserError, match=f"^loss_fn is '{name}': no critic model is built; expected one of"):
        find_loss(name)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_the_table_is_accepted_with_its_defaults_and_at_the_ends_of_its_ranges(
    name: str,
) -> None:
    assert validate(request(name)).loss_fn == name
    assert find_loss(name) is LOSSES[name]
    lows = {key: known.low for key, known in LOSSES[name].config.items()}
    highs = {key: known.high for key, known in LOSSES[name].config.items()}
    for ends in (lows, highs):
        message = request(name)
        config(**ends)(message)
        assert validate(message).loss_config == ends


@pytest.mark.parametrize(
    ("loss_fn", "values", "message"),
    [
        ("cross_entropy", {"beta": 0.1}, "unknown key 'beta', expected keys of cross_entropy: none"),
        (
            "ppo",
            {"beta": 0.1},
            "unknown key 'beta', expected keys of ppo: clip_low_threshold, clip_high_threshold",
        ),
        ("ppo", {"loss_id": "x"}, "unknown key 'loss_id', expected keys of ppo"),
        (
            "ppo",
            {"clip_low_threshold": "x"},
            "loss_fn_config['clip_low_threshold'] is 'x', expected a number in [0, 1e+06]",
        ),
        ("ppo", {"clip_low_threshold": -0.1}, "is -0.1, expected a number in [0, 1e+06]"),
        ("ppo", {"clip_high_threshold": float("nan")}, "is nan, expected a number in [0, 1e+06]"),
        (
            "ppo",
            {"clip_low_threshold": 2.0, "clip_high_threshold": 1.0},
            "is 2.0, expected at most 1.0 (clip_high_threshold)",
        ),
        ("ppo", {"clip_low_threshold": 1.5}, "is 1.5, expected at most 1.2 (clip_high_threshold)"),
        (
            "clip_cov",
            {"clip_cov_lb": 3.0, "clip_cov_ub": 2.0},
            "loss_fn_config['clip_cov_lb'] is 3.0, expected at most 2.0 (clip_cov_ub)",
        ),
        ("stable_reinforce", {"mask_low": 1.5}, "['mask_low'] is 1.5, expected a number in [0, 1]"),
        ("stable_reinforce", {"mask_high": 0.5}, "['mask_high'] is 0.5, expected a number in [1, 1e+06]"),
    ],
)
def test_a_wrong_config_is_named(loss_fn: str, values: dict[str, float | str], message: str) -> None:
    wrong = request(loss_fn)
    config(**values)(wrong)
    with pytest.raises(UserError, match=re.escape(message)):
        validate(wrong)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "loss_fn_config['loss_id'] is missing, expected the id of a loss made with create_custom_loss"),
        ({"loss_id": ""}, "loss_fn_config['loss_id'] is '', expected the id of a loss"),
        ({"loss_id": 7.0}, "loss_fn_config['loss_id'] is 7.0, expected the id of a loss"),
        ({"loss_id": "x", "beta": 1.0}, "loss_fn_config has the unknown key 'beta', expected only loss_id"),
    ],
)
def test_a_custom_loss_needs_its_id_and_nothing_else(values: dict[str, float | str], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        check_config(values, LOSSES["custom"])


def test_thresholds_that_meet_are_fine() -> None:
    message = request("ppo")
    config(clip_low_threshold=1.0, clip_high_threshold=1.0)(message)
    assert validate(message).loss_config == {"clip_high_threshold": 1.0, "clip_low_threshold": 1.0}


def test_the_id_of_a_custom_loss_is_no_number_of_its_config() -> None:
    value = validate(request("custom"))
    assert (value.loss_id, value.loss_config) == ("x", {})
    assert validate(request()).loss_id is None
