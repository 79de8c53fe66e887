"""forward_backward: every datum, before anything is accepted to run."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.wire.codec import RawForwardBackward, raw_config, read_value
from skyrl_tinker.wire.losses import LOSSES, NOT_YET, LossSpec
from skyrl_tinker.wire.validate.limits import Limits
from skyrl_tinker.wire.values import Datum, Float32, ForwardBackward


def validate_forward_backward(raw: RawForwardBackward, limits: Limits) -> ForwardBackward:
    """Raises UserError naming datum, field, found and expected; NotSupportedError for what is not built yet.

    Inputs that the loss does not read and provenance spans are accepted unread.
    """
    if raw.problem is not None:
        raise raw.problem
    spec = _loss(raw.message.loss_fn)
    _check_config(raw_config(raw.message), spec)
    _check_count(len(raw.message.data), limits)
    value = read_value(raw.message)
    for index, datum in enumerate(value.data):
        _check_datum(datum, f"datum {index}", limits)
    return value


def _loss(name: str) -> LossSpec:
    if name in LOSSES:
        return LOSSES[name]
    known = ", ".join(LOSSES)
    if name in NOT_YET:
        raise NotSupportedError(f"loss_fn is {name!r}, which is not built yet; expected one of {known}")
    raise UserError(f"loss_fn is {name!r}, expected one of {known}")


def _check_config(config: Mapping[str, float | str], spec: LossSpec) -> None:
    known = ", ".join(spec.config) or "none"
    for key, value in config.items():
        if key not in spec.config:
            raise UserError(
                f"loss_fn_config has the unknown key {key!r}, expected keys of {spec.name}: {known}"
            )
        low, high = spec.config[key].low, spec.config[key].high
        if isinstance(value, str) or not low <= value <= high:
            raise UserError(f"loss_fn_config[{key!r}] is {value!r}, expected a number in [{low:g}, {high:g}]")
    _check_thresholds({key: config.get(key, spec.config[key].default) for key in spec.config})


def _check_thresholds(config: Mapping[str, float | str]) -> None:
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", np.inf)
    if float(low) > float(high):
        raise UserError(
            f"loss_fn_config['clip_low_threshold'] is {low}, expected at most {high} (clip_high_threshold)"
        )


def _check_count(count: int, limits: Limits) -> None:
    if not count:
        raise UserError("data is empty, expected at least one datum")
    if count > limits.max_datums:
        raise UserError(f"data has {count} datums, expected at most {limits.max_datums}")


def _check_datum(datum: Datum, where: str, limits: Limits) -> None:
    length = len(datum.tokens)
    if not length:
        raise UserError(f"{where}: model_input is empty, expected at least one token")
    if length > limits.context_length:
        raise UserError(
            f"{where}: model_input has {length} tokens, "
            f"expected at most {limits.context_length} (the context length)"
        )
    _check_ids(datum.tokens, f"{where}: model_input", limits.vocab_size)
    target_field = f"{where}: loss_fn_inputs['target_tokens']"
    _check_length(len(datum.target_tokens), target_field, length)
    _check_ids(datum.target_tokens, target_field, limits.vocab_size)
    for name, values in datum.inputs.items():
        field = f"{where}: loss_fn_inputs[{name!r}]"
        _check_length(len(values), field, length)
        _check_finite(values, field)


def _check_length(found: int, field: str, expected: int) -> None:
    if found != expected:
        raise UserError(f"{field} has length {found}, expected {expected} (the length of model_input)")


def _check_ids(ids: npt.NDArray[np.int32] | npt.NDArray[np.int64], field: str, vocab_size: int) -> None:
    if ids.min() < 0 or ids.max() >= vocab_size:
        index = int(((ids < 0) | (ids >= vocab_size)).argmax())
        raise UserError(f"{field}[{index}] is {ids[index]}, expected a token id in [0, {vocab_size})")


def _check_finite(values: Float32, field: str) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        index = int(finite.argmin())
        raise UserError(f"{field}[{index}] is {values[index]}, expected a finite number")
