"""The port of full-parameter weight sync: what a transport says, and how the four phases are driven."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from skyrl_tinker.errors import SamplerError

Message = Mapping[str, Any]
"""JSON object that travels to every worker of every sampler."""


class WeightTransport(Protocol):
    """One way to bring a directory of safetensors to the samplers; its vLLM side has the same name."""

    @property
    def backend(self) -> str: ...

    @property
    def init_info(self) -> Message: ...

    def updates(self, directory: Path) -> Sequence[Message]:
        """The chunks, in the order to send. SamplerError when the directory holds no weights."""
        ...

    @property
    def discard(self) -> Message:
        """The update that ends a failed session; workers answer it with an error on purpose."""
        ...


class ControlPlane(Protocol):
    """The samplers as a whole: each call reaches all of them or raises SamplerError."""

    async def pause(self, mode: Literal["abort", "wait", "keep"], *, clear_cache: bool) -> None: ...
    async def resume(self) -> None: ...
    async def init_weight_transfer_engine(self, info: Message) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, info: Message) -> None: ...
    async def finish_weight_update(self, version: str) -> None: ...


async def sync_weights(
    control: ControlPlane, transport: WeightTransport, directory: Path, version: str
) -> None:
    """Make the samplers serve the weights in `directory` as `version`.

    The chunks are staged while sampling goes on; requests stand still only while they are applied, then go on
    with the new weights and nothing cached from the old. SamplerError: the old weights go on serving.
    """
    updates = transport.updates(directory)
    await control.init_weight_transfer_engine(transport.init_info)
    try:
        await control.start_weight_update()
        for update in updates:
            await control.update_weights(update)
        await _apply(control, version)
    except BaseException:
        with suppress(SamplerError):  # its answer is an error by design
            await control.update_weights(transport.discard)
        raise


async def _apply(control: ControlPlane, version: str) -> None:
    await control.pause("keep", clear_cache=True)
    try:
        await control.finish_weight_update(version)
    finally:
        await control.resume()
