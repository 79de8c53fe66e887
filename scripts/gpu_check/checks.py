"""One check: rows under a name. Its failure is a row, too."""

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gpu_check.rows import Row, failed


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    run: Callable[[], Iterable[Row]]

    def rows(self) -> Iterator[Row]:
        try:
            yield from self.run()
        except Exception as error:
            traceback.print_exc()
            yield failed(self.name, error)
