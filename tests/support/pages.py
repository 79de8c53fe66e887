"""The pages of the documentation and their fenced blocks."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    text: str

    @property
    def name(self) -> str:
        """The page and the beginning of the block's first line, without its comment."""
        first = self.text.strip().splitlines()[0].partition("  #")[0]
        return f"{self.page}: {' '.join(first.split())[:50].rstrip()}"


def blocks() -> list[Block]:
    return [
        Block(str(page.relative_to(ROOT)), language, text)
        for page in PAGES
        for language, text in _BLOCK.findall(page.read_text())
    ]


def block(name: str) -> Block:
    (found,) = (each for each in blocks() if each.name == name)
    return found
