"""Commands that look at a running server: its work, its users, and its logs."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from inspect import Signature, signature
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from skyrl_tinker import config
from skyrl_tinker.cli import metrics_file, running_server, server_logs, server_tables
from skyrl_tinker.cli.options import Config, Home, one_line_errors, path, seconds, with_added
from skyrl_tinker.cli.running_server import RunningServer, understood
from skyrl_tinker.cli.terminal import printable, show, width
from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.units import counted
from skyrl_tinker.protocol.schemas.console import RunColumn

app = typer.Typer()
checkpoints = typer.Typer(no_args_is_help=True, help="List and delete checkpoints.", rich_markup_mode=None)
app.add_typer(checkpoints, name="checkpoints")
bases = typer.Typer(rich_markup_mode=None)
app.add_typer(bases, name="bases")

Url = Annotated[
    str | None,
    typer.Option(
        help="Of the server [default: that of --home or --config, else TINKER_BASE_URL, else that of the "
        "default home]"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]
BaseModel = Annotated[str, typer.Argument(metavar="NAME", help="Base model on demand, as `bases` names it")]
OfRun = Annotated[str | None, typer.Option("--run", help="Only those of a run")]
OfOwner = Annotated[str | None, typer.Option("--owner", help="Only those of a key, by its name")]
OlderThan = Annotated[
    int | None,
    typer.Option(parser=seconds, metavar="DURATION", help="Only those saved so long ago, as in 12h or 30d"),
]


def with_server(
    command: Callable[..., None], check: Callable[..., None] = lambda **_: None
) -> Callable[..., None]:
    """Add the options that tell a running server to a command, whose first parameter is that server.

    `check`: of the other arguments, before that server is looked for.
    """

    @wraps(command)
    def run(url: str | None, home: Path | None, config_file: Path | None, **values: Any) -> None:
        with one_line_errors(), understood():
            check(**values)
            command(_running(url, home, config_file), **values)

    _, *own = signature(command).parameters.values()
    run.__signature__ = Signature(own)  # type: ignore[attr-defined]
    return with_added({"url": Url, "home": Home, "config_file": Config})(run)


@app.command()
@with_server
def status(server: RunningServer, as_json: AsJson = False) -> None:
    """Show a server's problems, trainer, samplers and queue. TINKER_API_KEY says whose."""
    now = server.now()
    show([json.dumps(now)] if as_json else server_tables.status_lines(now))
    if not now["ready"]:
        raise typer.Exit(1)


@app.command()
@with_server
def ps(server: RunningServer, as_json: AsJson = False) -> None:
    """Show the processes and replicas of a running server."""
    now = server.now()
    shown = {name: now[name] for name in ("processes", "replicas")}
    show([json.dumps(shown)] if as_json else server_tables.process_lines(now))


@app.command()
@with_server
def top(
    server: RunningServer,
    interval: Annotated[float, typer.Option(help="Seconds", min=0.2)] = 2.0,
    times: Annotated[
        int | None, typer.Option(help="Times to show them [default: until Ctrl-C]", min=1)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show `status` and `ps` again and again."""
    with suppress(KeyboardInterrupt):
        server_tables.watch(server, interval, times, as_json=as_json)


@app.command()
@with_server
def runs(
    server: RunningServer,
    most: Annotated[
        int, typer.Option("--lines", "-n", help="Runs, the first in their order", min=1, max=1000)
    ] = 20,
    search: Annotated[str, typer.Option(help="Words of names, projects, owners, states and metadata")] = "",
    sort: Annotated[
        RunColumn, typer.Option(help="Order of all, of steps, reward and last_request downwards")
    ] = "last_request",
    reverse: Annotated[bool, typer.Option("--reverse", "-r", help="The other way round")] = False,
    as_json: AsJson = False,
) -> None:
    """Show training runs, and why some failed. One's own, with an admin key those of all."""
    found = server.runs(most, search, sort, reverse=reverse)
    show([json.dumps(found)] if as_json else server_tables.run_lines(found, width()))


@app.command()
@with_server
def follow(
    server: RunningServer,
    log_path: Annotated[
        Path, typer.Argument(help="Directory that a script logs to, or its metrics.jsonl", parser=path)
    ],
    run: Annotated[
        str | None,
        typer.Option(help="Id of the run [default: that of its last checkpoint, else the one used last]"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End at the end of the file")] = False,
) -> None:
    """Report the numbers of a script's metrics.jsonl to its run. As the cookbook writes it; until Ctrl-C."""
    on = not once
    with suppress(KeyboardInterrupt):
        if run is not None:
            metrics_file.require_run(server, run, "--run")
        file = metrics_file.metrics_file(log_path, on=on)
        chosen, seen = run or metrics_file.run_of(file, server) or server.newest_run(), 0.0
        show([f"{file}: reported to run {chosen}"])
        for record in metrics_file.records(file, on=on):
            if run is None and (written := file.stat().st_mtime) != seen:
                seen, before = written, chosen
                chosen = metrics_file.run_of(file, server) or before
                if chosen != before:
                    show([f"{file}: from now on reported to run {chosen}"])
            metrics_file.report(server, chosen, record)


@app.command()
@with_server
def end(
    server: RunningServer, session: Annotated[str, typer.Argument(help="Id of a session, or of a run of it")]
) -> None:
    """End a session, as of a script that was stopped. Its models leave the trainer, its checkpoints stay."""
    server.end(session.partition(":")[0])


@app.command()
@with_server
def usage(
    server: RunningServer,
    hours: Annotated[int, typer.Option(help="Up to now", min=1, max=336)] = 24,
    days: Annotated[
        int | None,
        typer.Option(help="Days up to today, in UTC: print CSV by day instead", min=1, max=3660),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show tokens, checkpoints and storage by owner. One's own, with an admin key those of all."""
    if days is not None:
        show(server_tables.usage_by_day(server.usage_of_days(days)))
        return
    used = server.usage(hours)
    show([json.dumps(used)] if as_json else server_tables.usage_lines(used))


@checkpoints.command(name="list")
@with_server
def list_checkpoints(
    server: RunningServer,
    run: OfRun = None,
    owner: OfOwner = None,
    older_than: OlderThan = None,
    as_json: AsJson = False,
) -> None:
    """Show checkpoints, the oldest first: one's own, with an admin key those of all."""
    found = server.checkpoints(run, older_than or 0, owner)
    show([json.dumps(found)] if as_json else server_tables.checkpoint_lines(found))


def _check_chosen(paths: list[str] | None, yes: bool, **all_of: Any) -> None:
    if bool(paths) == any(each is not None for each in all_of.values()):
        raise typer.BadParameter("expected either paths, or one or more of --run, --owner and --older-than")
    for each in paths or ():
        tinker_path.parse(each)


@checkpoints.command(name="delete")
@partial(with_server, check=_check_chosen)
def delete_checkpoints(
    server: RunningServer,
    paths: Annotated[list[str] | None, typer.Argument(metavar="PATH", help="tinker:// paths")] = None,
    run: OfRun = None,
    owner: OfOwner = None,
    older_than: OlderThan = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
) -> None:
    """Delete checkpoints, by their paths, or all of a run, of a key or of an age. This is final.

    It shows them and asks first. One that is gone by then is passed over. With an admin key those of all
    are meant, unless --owner names a key. For example:

    \b
      skyrl-tinker checkpoints delete --older-than 30d
    """
    chosen, whose = [tinker_path.parse(path) for path in paths or ()], ""
    if not paths:
        found = server.checkpoints(run, older_than or 0, owner)
        show(server_tables.checkpoint_lines(found))
        chosen = [tinker_path.parse(each["tinker_path"]) for each in found]
        whose = f" of {', '.join(sorted({printable(each['owner']) for each in found}))}"
    if chosen and not yes:
        typer.confirm(f"delete {counted(len(chosen), 'checkpoint')}{whose}?", abort=True)
    deleted = sum(map(server.delete_checkpoint, chosen))
    show([f"deleted: {deleted}"])


@bases.callback(invoke_without_command=True)
def list_bases(
    context: typer.Context,
    url: Url = None,
    home: Home = None,
    config_file: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show base models, start them on demand, and stop them.

    Shows their roles, start, state and for how long, idle time, trainer ranks, replicas, memory. Each rank
    holds a GPU, and each replica its GPUs, only while a base model runs. Memory is that of its ranks and
    samplers, resident, as in `ps`; where there are keys, an admin's shows it, and none with --ray-address.
    One with the start "on_demand" starts with a request, or by `bases start`.
    """
    if context.invoked_subcommand is not None:
        if as_json or any(each is not None for each in (url, home, config_file)):
            raise typer.BadParameter("expected options after start or stop")
        return
    with one_line_errors(), understood():
        found = _running(url, home, config_file).now()["server"]["base_models"]
        show([json.dumps(found)] if as_json else server_tables.base_lines(found))


@bases.command()
@with_server
def start(server: RunningServer, name: BaseModel) -> None:
    """Start a base model on demand, before it is asked for. It stops once it has been idle, as always."""
    show([server.change_base(name, "start")["detail"]])


@bases.command()
@with_server
def stop(server: RunningServer, name: BaseModel) -> None:
    """Stop a base model on demand, once no request waits or runs; the next one starts it again."""
    show([server.change_base(name, "stop")["detail"]])


@app.command()
def logs(
    part: Annotated[str | None, typer.Option(help="Such as api or engine [default: all]")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Of each part", min=0, max=1_000_000)] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C")] = False,
    home: Home = None,
    config_file: Config = None,
) -> None:
    """Show the last lines of a server's logs. Also of one that does not run."""
    with one_line_errors(), suppress(KeyboardInterrupt):
        files = server_logs.log_files(config.load(config_file, home=home), part)
        shown = server_logs.last_lines(files, lines)
        for line in chain(shown, server_logs.follow(files)) if follow else shown:
            show([line])


def _running(url: str | None, home: Path | None, config_file: Path | None) -> RunningServer:
    """Find the server that an option tells, else TINKER_BASE_URL, else the home of the settings."""
    if url is None and home is None and config_file is None:
        url = os.environ.get("TINKER_BASE_URL") or None
    if url is None:
        return running_server.of_home(config.load(config_file, home=home))
    return running_server.at(url)
