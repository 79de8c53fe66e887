"""What a forward_backward may get wrong, each with the message the user reads."""

from collections.abc import Callable

import numpy as np
import pytest

from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.wire.codec import RawForwardBackward
from skyrl_tinker.wire.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.wire.validate import Limits, validate_forward_backward

LIMITS = Limits(vocab_size=10, context_length=4, max_datums=3, base_models=("m",), max_lora_rank=8)
INPUTS = {"cross_entropy": ("weights",), "ppo": ("logprobs", "advantages")}

Change = Callable[[pb.ForwardBackwardRequest], object]


def tensor(values: object, dtype: type = np.float32, shape: tuple[int, ...] = ()) -> pb.Tensor:
    names = {np.float32: pb.DTYPE_FLOAT32, np.int64: pb.DTYPE_INT64}
    return pb.Tensor(dense=np.asarray(values, dtype).tobytes(), dtype=names[dtype], shape=shape)


def request(loss_fn: str = "cross_entropy", datums: int = 2) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=loss_fn)
    for _ in range(datums):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([1, 2, 3], np.int32).tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor([2, 3, 4], np.int64, (3,)))
        for name in INPUTS.get(loss_fn, ()):
            datum.loss_fn_inputs[name].CopyFrom(tensor([0.0, -1.5, 2.0]))
    return message


def validate(message: pb.ForwardBackwardRequest):
    return validate_forward_backward(RawForwardBackward(message), LIMITS)


def tokens(*ids: int) -> Change:
    def change(message: pb.ForwardBackwardRequest) -> None:
        message.data[1].model_input[0].encoded_text.tokens = np.array(ids, np.int32).tobytes()

    return change


def put(name: str, value: pb.Tensor) -> Change:
    return lambda message: message.data[1].loss_fn_inputs[name].CopyFrom(value)


def config(**values: float | str) -> Change:
    def change(message: pb.ForwardBackwardRequest) -> None:
        for key, value in values.items():
            setattr(message.loss_fn_config_v2[key], "text" if isinstance(value, str) else "number", value)

    return change


def sparse(message: pb.ForwardBackwardRequest) -> None:
    message.data[1].loss_fn_inputs["weights"].sparse_csr.values = b""


TARGETS, WEIGHTS = r"datum 1: loss_fn_inputs\['target_tokens'\]", r"datum 1: loss_fn_inputs\['weights'\]"

WRONG: list[tuple[Change, str]] = [
    (lambda m: m.ClearField("data"), "data is empty, expected at least one datum"),
    (lambda m: m.data.extend([m.data[0]] * 2), "data has 4 datums, expected at most 3"),
    (
        lambda m: m.data[1].ClearField("model_input"),
        "datum 1: model_input is empty, expected at least one token",
    ),
    (tokens(1, 2, 3, 4, 5), r"datum 1: model_input has 5 tokens, expected at most 4 \(the context length\)"),
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
        put("weights", tensor([1, 2, 3, 4])),
        WEIGHTS + r" has length 4, expected 3 \(the length of model_input\)",
    ),
    (put("weights", tensor([])), WEIGHTS + r" has length 0, expected 3 \(the length of model_input\)"),
    (put("weights", tensor([1, np.nan, 3])), WEIGHTS + r"\[1\] is nan, expected a finite number"),
    (put("weights", tensor([1, 2, -np.inf])), WEIGHTS + r"\[2\] is -inf, expected a finite number"),
    (put("weights", tensor([1, 2, 3], shape=(4,))), WEIGHTS + r" has 3 values, expected 4 \(its shape\)"),
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
        lambda m: m.data[1].loss_fn_inputs.pop("weights"),
        r"datum 1: loss_fn_inputs lacks 'weights', found \['target_tokens'\]",
    ),
    (lambda m: m.data[1].loss_fn_inputs.clear(), "datum 1: loss_fn_inputs lacks 'target_tokens', found none"),
    (
        lambda m: setattr(m, "loss_fn", "dpo"),
        "loss_fn is 'dpo', expected one of cross_entropy, importance_sampling, ppo, cispo",
    ),
    (config(beta=0.1), r"loss_fn_config has the unknown key 'beta', expected keys of cross_entropy: none"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(change: Change, message: str) -> None:
    wrong = request()
    change(wrong)
    with pytest.raises(UserError, match=f"^{message}"):
        validate(wrong)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beta": 0.1}, "unknown key 'beta', expected keys of ppo: clip_low_threshold, clip_high_threshold"),
        (
            {"clip_low_threshold": "x"},
            r"loss_fn_config\['clip_low_threshold'\] is 'x', expected a number in \[0, 1e\+06\]",
        ),
        ({"clip_low_threshold": -0.1}, r"is -0.1, expected a number in \[0, 1e\+06\]"),
        ({"clip_high_threshold": float("nan")}, r"is nan, expected a number in \[0, 1e\+06\]"),
        (
            {"clip_low_threshold": 2.0, "clip_high_threshold": 1.0},
            r"is 2.0, expected at most 1.0 \(clip_high_threshold\)",
        ),
        ({"clip_low_threshold": 1.5}, r"is 1.5, expected at most 1.2 \(clip_high_threshold\)"),
    ],
)
def test_a_wrong_config_is_named(values: dict[str, float | str], message: str) -> None:
    wrong = request("ppo")
    config(**values)(wrong)
    with pytest.raises(UserError, match=message):
        validate(wrong)


@pytest.mark.parametrize("loss_fn", ["dro", "gspo", "stable_reinforce", "custom"])
def test_losses_of_later_versions_are_refused_as_such(loss_fn: str) -> None:
    with pytest.raises(
        NotSupportedError, match=f"loss_fn is '{loss_fn}', which is not built yet; expected one of"
    ):
        validate(request(loss_fn))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            put("target_tokens", tensor([[1, 2]] * 3, np.int64, (3, 2))),
            TARGETS + r" has shape \[3, 2\], expected \[N\]",
        ),
        (put("weights", tensor([1, 2, 3], shape=(3, 1))), WEIGHTS + r" has shape \[3, 1\], expected \[N\]"),
        (sparse, WEIGHTS + r" has shape \[\], expected \[N\]"),
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
