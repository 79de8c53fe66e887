"""Hook of mkdocs: links to files outside of docs/, which the site has not, become their text."""

import re

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    return _OUTSIDE.sub(r"\1", markdown)
