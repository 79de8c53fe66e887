"""loss_fn and loss_fn_config of a forward_backward."""

from collections.abc import Mapping

from skyrl_tinker.domain.loss_specs import CUSTOM, LOSSES, LossSpec
from skyrl_tinker.errors import UserError

_CRITIC_LOSSES = frozenset({"critic", "value", "value_clip"})
_BOUNDS = (("clip_low_threshold", "clip_high_threshold"), ("clip_cov_lb", "clip_cov_ub"))
"""Pairs of keys: the value of the first must not exceed that of the second."""


def find_loss(name: str) -> LossSpec:
    """Return a loss by name. Raises UserError that lists all losses."""
    if name in LOSSES:
        return LOSSES[name]
    known = ", ".join(LOSSES)
    if name in _CRITIC_LOSSES:
        raise UserError(f"loss_fn is {name!r}: no critic model is built; expected one of {known}")
    raise UserError(f"loss_fn is {name!r}, expected one of {known}")


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
            f"loss_fn_config['loss_id'] is {'missing' if loss_id is None else repr(loss_id)}, "
            "expected the id of a loss made with create_custom_loss: send it with forward_backward_custom"
        )
    for key in config.keys() - {"loss_id"}:
        raise UserError(f"loss_fn_config has the unknown key {key!r}, expected only loss_id")


def _check_ranges(config: Mapping[str, float | str], spec: LossSpec) -> None:
    known = ", ".join(spec.config) or "none"
    for key, value in config.items():
        if key not in spec.config:
            raise UserError(
                f"loss_fn_config has the unknown key {key!r}, expected keys of {spec.name}: {known}"
            )
        low, high = spec.config[key].low, spec.config[key].high
        if isinstance(value, str) or not low <= value <= high:
            raise UserError(f"loss_fn_config[{key!r}] is {value!r}, expected a number in [{low:g}, {high:g}]")
