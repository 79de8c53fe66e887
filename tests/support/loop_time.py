"""Time of event loops, of which a test need not wait for the end."""

import asyncio


def skip(seconds: float) -> None:
    """Move the running loop's clock on: what is due by then is due now."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
