"""Settings of a server, parsed once and frozen.

In: arguments, variables of the environment, a file, with the names that settings had before. Out: `Settings`,
whose tables (`Timeouts`, `BaseOverrides`, …) hold what belongs together, and each one's words.
"""

from skyrl_tinker.config.descriptions import SECTIONS, default_of, description_of, keys_of, takes_pairs
from skyrl_tinker.config.former_settings import FORMER, successor
from skyrl_tinker.config.loading import load, read_back, variables
from skyrl_tinker.config.setting_tables import (
    BaseOverrides,
    Bodies,
    ConnectionLimits,
    EphemeralWeights,
    Parity,
    Phases,
    Recovery,
    Timeouts,
)
from skyrl_tinker.config.settings import Settings

__all__ = [
    "FORMER",
    "SECTIONS",
    "BaseOverrides",
    "Bodies",
    "ConnectionLimits",
    "EphemeralWeights",
    "Parity",
    "Phases",
    "Recovery",
    "Settings",
    "Timeouts",
    "default_of",
    "description_of",
    "keys_of",
    "load",
    "read_back",
    "successor",
    "takes_pairs",
    "variables",
]
