"""Counter of the operations that a thread dispatches to PyTorch, and of the memory behind their results."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Workspace = Callable[..., int]
"""(the operation's arguments) -> bytes that its kernel allocates and frees before it returns."""


class DispatchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter within its context, of real tensors and of fake ones.

    A storage counts from the operation that returns it, or from `hold`, until nothing refers to it. Memory
    within one operation is not counted, except that of `workspaces`. Under FakeTensorMode, to be entered
    first, a value that the host reads is 1 or true.
    """

    def __init__(self, workspaces: Mapping[Any, Workspace] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.reads = 0  # of values by the host, which waits for the device
        self.live = 0  # bytes
        self.peak = 0  # bytes, the most that were alive
        self._workspaces = workspaces or {}
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._resize = torch.UntypedStorage.resize_

    def hold(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Count storages that were there before."""
        for storage in storages:
            self._update(storage)

    def __enter__(self) -> "DispatchCounter":
        resize = self._resize

        @wraps(resize)
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._storages:
                self._update(storage)
            return result

        # FSDP frees and allocates whole weights by it, and it is not dispatched.
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # a question about a fake tensor, not an operation
            return func(*args)
        self.operations += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
            if isinstance(args[0], FakeTensor):
                return True if args[0].dtype == torch.bool else 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._update(leaf.untyped_storage())
        if func in self._workspaces:
            self.peak = max(self.peak, self.live + self._workspaces[func](*args, **(kwargs or {})))
        return result

    def _update(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        reference = weakref.ref(storage, lambda _: self._drop(key)) if known is None else known[0]
        self._storages[key] = (reference, size)
        self.live += size - (0 if known is None else known[1])
        self.peak = max(self.peak, self.live)

    def _drop(self, key: int) -> None:
        _, size = self._storages.pop(key)
        self.live -= size
