"""What the commands share: options, and how an error ends."""

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from skyrl_tinker.errors import SkyrlTinkerError

Home = Annotated[Path | None, typer.Option(help="Database, logs and checkpoints [default: .skyrl-tinker]")]
DatabaseUrl = Annotated[str | None, typer.Option(help="SQLAlchemy URL [default: SQLite under home]")]
Config = Annotated[
    Path | None, typer.Option("--config", help="A TOML file of settings", exists=True, dir_okay=False)
]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What we raise on purpose ends as one line on stderr and exit code 1; bugs keep their traceback."""
    try:
        yield
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        _fail(f"settings: {'; '.join(problems)}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        _fail(f"--config: not a TOML file: {error}")
    except SkyrlTinkerError as error:
        _fail(str(error))


def _fail(message: str) -> None:
    print(f"skyrl-tinker: {message}", file=sys.stderr)
    raise typer.Exit(1)
