"""Replacement of functions of the engine."""

from collections.abc import Callable
from functools import wraps
from inspect import getattr_static
from typing import Any

Function = Callable[..., Any]


def replaces(owner: Any) -> Callable[[Function], Function]:
    """Put the decorated function in the place of the one of its name in a class or module.

    It gets that one, bound if it is a class method, before its arguments.
    """

    def replace(function: Function) -> Function:
        name = function.__name__
        stock = getattr(owner, name)

        @wraps(stock)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return function(stock, *args, **kwargs)

        unbound = isinstance(getattr_static(owner, name), staticmethod | classmethod)
        setattr(owner, name, staticmethod(replaced) if unbound else replaced)
        return replaced

    return replace
