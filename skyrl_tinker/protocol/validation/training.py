"""forward_backward: check of every datum before the request may run."""

from collections.abc import Iterator, Mapping

import numpy as np

from skyrl_tinker.domain.loss_specs import CUSTOM, LOSSES, LossSpec
from skyrl_tinker.domain.values import Datum, ForwardBackward, Int32, Int64
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.protobuf.datums import TARGETS, input_field, inputs_read
from skyrl_tinker.protocol.protobuf.pass_requests import RawForwardBackward, raw_config, read_value
from skyrl_tinker.protocol.protobuf.pb import skyrl_tinker_wire_pb2 as pb
from skyrl_tinker.protocol.protobuf.tensors import count_values, refuse_where
from skyrl_tinker.protocol.schemas.base import shorten
from skyrl_tinker.protocol.validation.limits import Limits
from skyrl_tinker.protocol.validation.spans import check_spans

INPUTS_PER_TARGET = 4
"""Most numbers that a loss reads per target, the target counted; the limit for `custom`, too."""


_CRITIC_LOSSES = frozenset({"critic", "value", "value_clip"})
_BOUNDS = (("clip_low_threshold", "clip_high_threshold"), ("clip_cov_lb", "clip_cov_ub"))
"""Pairs of keys: the value of the first must not exceed that of the second."""


def find_loss(name: str) -> LossSpec:
    """Return a loss by name. Raises UserError that lists all losses."""
    if name in LOSSES:
        return LOSSES[name]
    known = ", ".join(LOSSES)
    if name in _CRITIC_LOSSES:
        raise UserError(f"loss_fn is {shorten(name)}: no critic model is built; expected one of {known}")
    raise UserError(f"loss_fn is {shorten(name)}, expected one of {known}")


def check_config(config: Mapping[str, float | str], spec: LossSpec) -> None:
    """Check a config as sent. Raises UserError for an unknown key or a value out of its range."""
    if spec.name == CUSTOM:
        _check_loss_id(config)
        return
    _check_ranges(config, spec)
    filled = {key: float(config.get(key, known.default)) for key, known in spec.config.items()}
    for low, high in _BOUNDS:
        if low in filled and filled[low] > filled[high]:
            raise UserError(
                f"loss_fn_config[{low!r}] is {filled[low]}, expected at most {filled[high]} ({high})"
            )


def _check_loss_id(config: Mapping[str, float | str]) -> None:
    loss_id = config.get("loss_id")
    if not isinstance(loss_id, str) or not loss_id or "\0" in loss_id:
        raise UserError(
            f"loss_fn_config['loss_id'] is {'missing' if loss_id is None else shorten(loss_id)}, "
            "expected the id of a loss made with create_custom_loss: send it with forward_backward_custom"
        )
    for key in config.keys() - {"loss_id"}:
        raise UserError(f"loss_fn_config has the unknown key {shorten(key)}, expected only loss_id")


def _check_ranges(config: Mapping[str, float | str], spec: LossSpec) -> None:
    known = ", ".join(spec.config) or "none"
    for key, value in config.items():
        if key not in spec.config:
            raise UserError(
                f"loss_fn_config has the unknown key {shorten(key)}, expected keys of {spec.name}: {known}"
            )
        low, high = spec.config[key].low, spec.config[key].high
        if isinstance(value, str) or not low <= value <= high:
            raise UserError(
                f"loss_fn_config[{key!r}] is {shorten(value)}, expected a number in [{low:g}, {high:g}]"
            )


def validate_forward_backward(raw: RawForwardBackward, limits: Limits) -> ForwardBackward:
    """Return the checked request.

    Raises UserError naming datum, field, found and expected; NotSupportedError for unsupported chunks.
    Inputs and provenance spans that the loss does not read are accepted unread. Refused are keys of its
    config and, where something is trained, what may be the misspelt name of an optional input.
    """
    if raw.problem is not None:
        raise raw.problem
    spec = find_loss(raw.message.loss_fn)
    check_config(raw_config(raw.message), spec)
    _check_count(len(raw.message.data), limits)
    _check_size(raw.message, spec, limits.max_targets)
    value = read_value(raw.message)
    for index, datum in enumerate(value.data):
        _check_names(set(raw.message.data[index].loss_fn_inputs), spec, f"datum {index}", value.forward_only)
        _check_datum(datum, spec, f"datum {index}", limits)
    return value


def _check_names(given: set[str], spec: LossSpec, where: str, forward_only: bool) -> None:
    if misplaced := given & spec.config.keys():
        raise UserError(
            f"{where}: loss_fn_inputs has {min(misplaced)!r}, expected one for all tokens, in loss_fn_config"
        )
    absent, unread = spec.optional.keys() - given, given - {TARGETS, *spec.inputs, *spec.optional}
    if absent and unread and spec.refuses_misspelt and not forward_only:
        others = " and ".join((TARGETS, *spec.inputs))
        raise UserError(
            f"{where}: loss_fn_inputs has {shorten(min(unread))}, which {spec.name} does not read, and no "
            f"{min(absent)!r}, expected that, or {others} alone"
        )


def _check_count(count: int, limits: Limits) -> None:
    if not count:
        raise UserError("data is empty, expected at least one datum")
    if count > limits.max_datums:
        raise UserError(f"data has {count} datums, expected at most {limits.max_datums}")


def _check_size(message: pb.ForwardBackwardRequest, spec: LossSpec, most: int) -> None:
    """Check sizes before values are read: a sparse tensor of a few bytes may hold any number of them."""
    targets = values = 0
    for name, field, count in _sizes(message, spec):
        if count > most:
            raise UserError(f"{field} has {count} values, expected at most {most}")
        targets += count if name == TARGETS else 0
        values += count
    if targets > most:
        raise UserError(f"data has {targets} target_tokens, expected at most {most} in one request")
    if values > INPUTS_PER_TARGET * most:
        raise UserError(
            f"loss_fn_inputs hold {values} values, expected at most {INPUTS_PER_TARGET * most} in one request"
        )


def _sizes(message: pb.ForwardBackwardRequest, spec: LossSpec) -> Iterator[tuple[str, str, int]]:
    for index, datum in enumerate(message.data):
        for name in inputs_read(datum, spec):
            if name in datum.loss_fn_inputs:
                field = input_field(f"datum {index}", name)
                yield name, field, count_values(datum.loss_fn_inputs[name], field)


def _check_datum(datum: Datum, spec: LossSpec, where: str, limits: Limits) -> None:
    length = len(datum.tokens)
    if not length:
        raise UserError(f"{where}: model_input is empty, expected at least one token")
    if length > limits.context_length:
        raise UserError(
            f"{where}: model_input has {length} tokens, "
            f"expected at most {limits.context_length} (the setting context_length of base model "
            f"{limits.base_model})"
        )
    _check_ids(datum.tokens, f"{where}: model_input", limits.vocab_size)
    _check_targets(datum.target_tokens, spec, input_field(where, "target_tokens"), length)
    _check_ids(datum.target_tokens, input_field(where, "target_tokens"), limits.vocab_size)
    if spec.name != CUSTOM:
        _check_inputs(datum, where)
    if spec.recorded:
        check_spans(datum, spec.name, where)


def _check_targets(targets: Int64, spec: LossSpec, field: str, length: int) -> None:
    if targets.ndim > 1 and not spec.candidates:
        raise UserError(
            f"{field} has shape {list(targets.shape)}, expected [{length}]: "
            f"loss {spec.name} takes one target per position"
        )
    if len(targets) != length:
        raise UserError(f"{field} has length {len(targets)}, expected {length} (the length of model_input)")


def _check_inputs(datum: Datum, where: str) -> None:
    expected = datum.target_tokens.shape
    for name, values in datum.inputs.items():
        field = input_field(where, name)
        if values.shape != expected:
            raise UserError(
                f"{field} has shape {list(values.shape)}, expected {list(expected)} (that of target_tokens)"
            )
        refuse_where(~np.isfinite(values), values, field, "a finite number")


def _check_ids(ids: Int32 | Int64, field: str, vocab_size: int) -> None:
    if ids.min() < 0 or ids.max() >= vocab_size:
        refuse_where((ids < 0) | (ids >= vocab_size), ids, field, f"a token id in [0, {vocab_size})")
