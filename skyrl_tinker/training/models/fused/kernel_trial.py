"""Trial of a kernel on the device where it is to run, before a model depends on it."""

from collections.abc import Callable, Sequence

import torch

_ERROR = 0.02  # of the L2 norm, relative; in 16 bits each kernel rounds to 0.4 %
_ERROR_OF_FLOAT32 = 1e-4


def fault_of(results: Callable[[], Sequence[torch.Tensor]], expected: Sequence[torch.Tensor]) -> str | None:
    """Return why the kernel that computes the results is not to be used, None if they are as expected."""
    most = _ERROR_OF_FLOAT32 if expected[0].dtype == torch.float32 else _ERROR
    try:
        errors = [_difference(*pair) for pair in zip(results(), expected, strict=True)]
    except Exception as error:  # of a package that does not fit the GPU or torch: another kernel computes
        return f"{type(error).__name__}: {error}"
    wrong = [error for error in errors if not error <= most]  # NaN is neither more nor less
    return f"relative error {wrong[0]:.3g}, expected at most {most}" if wrong else None


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
