"""Pickles that processes of one engine send each other through torch.distributed, signed by its token.

Gloo requires no token: while a group meets, another user of the machine could take a member's place and send
pickles, which can run any code.
"""

import hmac
import pickle
from typing import Any, BinaryIO

from torch.distributed import distributed_c10d

_DIGEST = "sha256"
_DIGEST_BYTES = 32


def apply(token: str) -> None:
    """Sign the pickles of this process's object collectives, and load only those signed with the token."""
    key = token.encode()

    class Pickler:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            content = pickle.dumps(value)
            self._file.write(hmac.digest(key, content, _DIGEST) + content)

    class Unpickler:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def load(self) -> Any:
            """Return the value. Raises pickle.UnpicklingError if the signature is wrong."""
            signature, content = self._file.read(_DIGEST_BYTES), self._file.read()
            if not hmac.compare_digest(signature, hmac.digest(key, content, _DIGEST)):
                raise pickle.UnpicklingError("a stranger has taken the place of a worker")
            return pickle.loads(content)

    for name, signing in (("_pickler", Pickler), ("_unpickler", Unpickler)):
        assert hasattr(distributed_c10d, name), f"torch.distributed has no {name} any more"
        setattr(distributed_c10d, name, signing)
