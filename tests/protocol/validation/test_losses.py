"""Errors in loss_fn and loss_fn_config, each with the message that the user reads."""

import re

import pytest

from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.validation.training import check_config, find_loss
from tests.protocol.support.messages import config, request, validate


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
        (
            {"loss_id": "x", "beta": 1.0},
            "loss_fn_config has the unknown key 'beta', expected only loss_id",
        ),
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
