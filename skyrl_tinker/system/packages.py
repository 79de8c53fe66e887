"""Packages of the environment, looked for without being imported."""

from importlib.util import find_spec


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package that it lies in
        return False
