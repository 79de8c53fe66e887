"""Options that commands share, made from the settings' fields, and the end of a command by an error."""

import difflib
import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from sqlalchemy.exc import OperationalError
from typer.core import TyperCommand

from skyrl_tinker import config
from skyrl_tinker.cli import terminal
from skyrl_tinker.config import Settings
from skyrl_tinker.errors import SkyrlTinkerError, UserError
from skyrl_tinker.protocol.schemas.base import describe


def option(setting: str) -> Any:
    """Return the option of one setting: its help names the default, but an absent one counts as not given."""
    field = Settings.model_fields[setting]
    description = config.description_of(field)
    if field.annotation is bool:
        name = setting.replace("_", "-")
        return typer.Option(f"--{name}/--no-{name}" if field.default else f"--{name}", help=description)
    if setting == "bases":
        return typer.Option("--also", help=description, metavar="NAME_OR_DIR[:USES]")
    metavar = "NAME=VALUE" if config.takes_pairs(setting) else _values(field.annotation)
    parser = path if Path in (field.annotation, *get_args(field.annotation)) else None
    return typer.Option(help=description + _default(field), metavar=metavar, parser=parser)


def path(text: str) -> Path:
    """Read a path: an empty text, as of a variable that is not set, would be the current directory."""
    if not text:
        raise typer.BadParameter("found an empty text, expected a path")
    return Path(text)


def _default(field: FieldInfo) -> str:
    return f" [default: {default}]" if (default := config.default_of(field)) else ""


def _values(annotation: Any) -> str | None:
    """Return the values of a closed set, as the help shows them."""
    closed = (part for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal)
    return "|".join(each for part in closed for each in get_args(part)) or None


def with_options(*settings: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add one option per setting to a command that takes `**settings` beside options of its own.

    Beside `max_lora_rank` also `full`, for `as_settings`.
    """
    options: dict[str, Any] = {}
    for name in settings:
        options[name] = Annotated[_option_type(name), option(name)]
        if name == "max_lora_rank":
            options["full"] = Full
    return with_added(options)


def as_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as settings. Raises UserError for a setting that is given twice."""
    settings = {name: value for name, value in given.items() if name != "full"}
    if not given.get("full"):
        return settings
    if settings["max_lora_rank"] is not None:
        raise UserError("settings: --full is short for --max-lora-rank 0: give one of them")
    return settings | {"max_lora_rank": 0}


def with_added(options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options, by name with their annotations, to a command that takes them as `**options`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in signature(command).parameters.values() if each.kind != each.VAR_KEYWORD]
        added = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in options.items()
        ]
        command.__signature__ = Signature([*own, *added])  # type: ignore[attr-defined]
        return command

    return decorate


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add --config and one option per setting to a command, whose first parameter is the Settings they make.

    Its errors end it as `one_line_errors` says.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(config_file: Path | None, **values: Any) -> None:
            given = {name: values.pop(name) for name in (*names, "full") if name in values}
            with one_line_errors():
                command(config.load(config_file, **as_settings(given)), **values)

        _, *own = signature(command).parameters.values()
        run.__signature__ = Signature(own)  # type: ignore[attr-defined]
        return with_options(*names)(with_added({"config_file": Config})(run))

    return decorate


def _option_type(setting: str) -> Any:
    """Return the type that the command line reads; Settings refuses wrong values, as from any source."""
    annotation = list[str] if config.takes_pairs(setting) else Settings.model_fields[setting].annotation
    parsed: Any = {Literal: str, tuple: list[str]}.get(get_origin(annotation), annotation)
    return parsed | None


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> int:
    """Read a duration, as in 90s, 15m, 12h and 30d; 0 needs no unit."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text, re.ASCII)
    if match is None and text != "0":
        raise typer.BadParameter(f"found {text!r}, expected a number and a unit: 90s, 15m, 12h or 30d")
    return int(match[1]) * _SECONDS[match[2]] if match else 0


_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write, which names no file."""


class SettingsCommand(TyperCommand):
    """Command whose options are settings: `--help` has their sections, former ones are refused."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        title, sections = "Options", dict[str, list[tuple[str, str]]]()
        for param in self.get_params(ctx):
            name = str(param.name)
            title = config.SECTIONS.get(name, "Options" if name == "help" else title)
            keys = config.keys_of(name).items()
            of_table = ((f"  {key}", config.description_of(field) + _default(field)) for key, field in keys)
            rows = sections.setdefault(title, [])
            rows += [*filter(None, [param.get_help_record(ctx)]), *of_table]
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for given in args:
            name = given.partition("=")[0]
            remedy = config.successor(name.removeprefix("--").replace("-", "_"))
            if remedy and name.startswith("--"):
                _fail(f"settings: {name}: {remedy}")
        return super().parse_args(ctx, args)


Home = Annotated[Path | None, option("home")]
Config = Annotated[
    Path | None, typer.Option("--config", help="A TOML file of settings", exists=True, dir_okay=False)
]


Full = Annotated[
    bool | None,
    typer.Option("--full", help="Short for --max-lora-rank 0: full parameters only"),
]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End with one line on stderr and exit code 1 on an error that we raise, of a file, or of the database.

    Bugs keep their traceback.
    """
    try:
        yield
    except ValidationError as error:
        _fail(f"settings: {'; '.join(map(_problem, error.errors()))}")
    except SkyrlTinkerError as error:
        _fail(str(error))
    except OperationalError as error:
        _fail(f"the database failed: {error.orig}")
    except UnicodeEncodeError as error:  # an argument with bytes beyond UTF-8, or a terminal of fewer letters
        _fail(f"{error.object[error.start : error.end]!r} is no text in {error.encoding}")
    except OSError as error:
        if error.filename is None and error.errno not in _NO_ROOM:
            raise
        _fail(f"{error.filename or 'home, /tmp or /dev/shm'}: {error.strerror}")


def _problem(found: Any) -> str:
    if found["type"] != "extra_forbidden":
        return describe([found])
    name = ".".join(map(str, found["loc"]))
    known = [each for setting in Settings.model_fields for each in (setting, *config.keys_of(setting))]
    near = difflib.get_close_matches(name, known, 1)
    unknown = f"there is no such setting{f', did you mean {near[0]}?' if near else ''}"
    variable = f"SKYRL_TINKER_{name.upper()}"
    shown = f"environment variable {variable}" if variable in os.environ else name
    return f"{shown}: {config.successor(name) or unknown}"


def _fail(message: str) -> None:
    first, *others = message.split("\n")  # of a log, for example; indented, so that they pass for no message
    terminal.tell(first, *(f"    {each}" for each in others))
    raise typer.Exit(1)
