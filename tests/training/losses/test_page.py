"""docs/losses.md says of every loss what domain.loss_specs does."""

import re
from pathlib import Path

from skyrl_tinker.domain.loss_specs import LOSSES

PAGE = Path(__file__).parents[3] / "docs" / "losses.md"


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose header row is `heading`."""
    lines = PAGE.read_text().splitlines()
    start = lines.index(heading) + 2
    stop = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:stop]]


def test_the_page_lists_every_loss_once_in_the_order_of_the_table() -> None:
    for heading in ("| loss | inputs | source |", "| loss | value |"):
        assert [row[0] for row in rows(heading)] == [f"`{name}`" for name in LOSSES]


def test_the_page_names_the_inputs_that_a_client_sends() -> None:
    for loss, inputs, _ in rows("| loss | inputs | source |"):
        spec = LOSSES[loss.strip("`")]
        assert re.findall(r"(?<!\()`(\w+)`", inputs) == list(spec.inputs)
        assert re.findall(r"\(`(\w+)`\)", inputs) == list(spec.optional)


def test_the_page_gives_every_key_with_its_default_and_range() -> None:
    found = [
        (loss.strip("`"), key.strip("`"), float(default), float(low), float(high))
        for loss, key, default, low, high in rows("| loss | key | default | from | to |")
    ]
    assert found == [
        (name, key, known.default, known.low, known.high)
        for name, spec in LOSSES.items()
        for key, known in spec.config.items()
    ]


def test_the_page_names_every_loss_that_takes_candidates() -> None:
    section = PAGE.read_text().split("## Several candidates at a position")[1].split("##")[0]
    named = {name for name in LOSSES if f"`{name}`" in section}
    assert named == {name for name, spec in LOSSES.items() if spec.candidates}
