"""Turns at the samplers' compilers of grammars."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from functools import partial

from skyrl_tinker.engine.scheduling.priorities import Share
from skyrl_tinker.system.turns import Turns

KNOWN = 64
"""Most grammars that count as compiled: no more than samplers keep, at least 512 MiB of up to 6 MB each.

To forget one costs its next request a turn, but no compile.
"""


class GrammarTurns:
    """Grammars that samplers compile ahead of the requests with them, of each share one at a time.

    Samplers compile in the order of arrival, a schema for up to a minute, and go on if its client gives up.
    """

    def __init__(self, known: int = KNOWN) -> None:
        self._most = known
        self._compiled: OrderedDict[Hashable, None] = OrderedDict()  # least recently used first
        self._turns = Turns()

    async def compiled(
        self, share: Share, grammar: Hashable, compile_it: Callable[[], Awaitable[bool]]
    ) -> None:
        """Return once a grammar has been compiled, or tried, in a turn of its share unless it is known.

        It is known once `compile_it`, whose errors are raised, returned True.
        """
        if not self._knows(grammar):
            await self._turns.run(share, partial(self._compile, grammar, compile_it))

    async def _compile(self, grammar: Hashable, compile_it: Callable[[], Awaitable[bool]]) -> None:
        if self._knows(grammar):  # by the turn before
            return
        if await compile_it():
            self._compiled[grammar] = None
        if len(self._compiled) > self._most:
            self._compiled.popitem(last=False)

    def _knows(self, grammar: Hashable) -> bool:
        if known := grammar in self._compiled:
            self._compiled.move_to_end(grammar)
        return known
