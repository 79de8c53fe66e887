"""Files of weight versions; those in memory are lost in a reboot."""

from pathlib import Path

from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.errors import StateLostError


def has_files(version: WeightVersion) -> bool:
    return Path(version.directory).is_dir()


def require_files(version: WeightVersion) -> None:
    """Raise StateLostError if they are gone."""
    if not has_files(version):
        raise StateLostError(
            f"the weights of this sampling client are gone from '{version.directory}': save them again"
        )
