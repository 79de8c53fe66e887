"""Commands of the `tinker` CLI in one process, whose start is what costs: JSON of [[argument, ...], ...] in,
JSON of what each printed out.
"""

import io
import json
import os
import sys
from contextlib import redirect_stdout

from tinker.cli.__main__ import main_cli


def said(arguments: list[str]) -> str:
    """What `tinker ARGUMENTS` prints; it raises what makes the CLI exit with 1."""
    with redirect_stdout(io.StringIO()) as out:
        main_cli.main(arguments, "tinker", standalone_mode=False)
    return out.getvalue()


if __name__ == "__main__":
    answers = [said(arguments) for arguments in json.loads(sys.argv[1])]
    print(json.dumps(answers), flush=True)
    os._exit(0)  # without an end of Python, which may abort while a thread of the SDK writes
