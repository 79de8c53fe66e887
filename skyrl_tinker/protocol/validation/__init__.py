"""Everything a request may get wrong that can be told from the request and the base model's facts alone.

Messages name the field (and datum), what was found and what was expected.
"""

from skyrl_tinker.domain.tinker_path import validate_checkpoint_name
from skyrl_tinker.protocol.validation.limits import Limits, validate_base_model
from skyrl_tinker.protocol.validation.models import validate_lora_config, validate_optimizer_config
from skyrl_tinker.protocol.validation.sampling import validate_sample
from skyrl_tinker.protocol.validation.steps import (
    refuse_access_token,
    validate_create_via_load,
    validate_load_weights,
    validate_optim_step,
    validate_save_external,
    validate_save_sampler,
    validate_save_weights,
    validate_step_params,
    validate_ttl,
)
from skyrl_tinker.protocol.validation.training import validate_forward_backward

__all__ = [
    "Limits",
    "refuse_access_token",
    "validate_base_model",
    "validate_checkpoint_name",
    "validate_create_via_load",
    "validate_forward_backward",
    "validate_load_weights",
    "validate_lora_config",
    "validate_optim_step",
    "validate_optimizer_config",
    "validate_sample",
    "validate_save_external",
    "validate_save_sampler",
    "validate_save_weights",
    "validate_step_params",
    "validate_ttl",
]
