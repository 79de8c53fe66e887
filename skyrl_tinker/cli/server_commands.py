"""Commands that look at a running server: its work, its users, and its logs."""

import json
import os
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from skyrl_tinker import config
from skyrl_tinker.cli import metrics_file, running_server, server_logs
from skyrl_tinker.cli.options import Config, Home, one_line_errors, path
from skyrl_tinker.cli.running_server import RunningServer, understood
from skyrl_tinker.cli.terminal import show

app = typer.Typer()

Url = Annotated[
    str | None,
    typer.Option(help="Of the server [default: that of --home or --config, else TINKER_BASE_URL]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]


@app.command()
def status(url: Url = None, home: Home = None, config_file: Config = None, as_json: AsJson = False) -> None:
    """Show a running server: problems first, then trainer, samplers and queue. TINKER_API_KEY says whose."""
    with one_line_errors(), understood():
        now = _running(url, home, config_file).now()
        show([json.dumps(now)] if as_json else running_server.status_lines(now))
        ready = now["ready"]
    if not ready:
        raise typer.Exit(1)


@app.command()
def ps(url: Url = None, home: Home = None, config_file: Config = None, as_json: AsJson = False) -> None:
    """Show the processes and replicas of a running server."""
    with one_line_errors(), understood():
        now = _running(url, home, config_file).now()
        shown = {name: now[name] for name in ("processes", "replicas")}
        show([json.dumps(shown)] if as_json else running_server.process_lines(now))


@app.command()
def top(
    url: Url = None,
    home: Home = None,
    config_file: Config = None,
    interval: Annotated[float, typer.Option(help="Seconds", min=0.2)] = 2.0,
    times: Annotated[int | None, typer.Option(help="[default: until Ctrl-C]", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Show `status` and `ps` again and again."""
    with one_line_errors(), understood(), suppress(KeyboardInterrupt):
        server = _running(url, home, config_file)
        running_server.watch(server, interval, times, as_json=as_json)


@app.command()
def runs(
    url: Url = None,
    home: Home = None,
    config_file: Config = None,
    most: Annotated[
        int, typer.Option("--lines", "-n", help="Runs, the last used first", min=1, max=1000)
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Show training runs, and why some failed: one's own, with an admin key those of all."""
    with one_line_errors(), understood():
        found = _running(url, home, config_file).runs(most)
        show([json.dumps(found)] if as_json else running_server.run_lines(found))


@app.command()
def follow(
    log_path: Annotated[
        Path, typer.Argument(help="Directory that a script logs to, or its metrics.jsonl", parser=path)
    ],
    run: Annotated[
        str | None,
        typer.Option(help="[default: that of its last checkpoint, else the run that was used last]"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End at the end of the file")] = False,
    url: Url = None,
    home: Home = None,
    config_file: Config = None,
) -> None:
    """Report the numbers of a script's metrics.jsonl, as the cookbook writes it, to its run, until Ctrl-C."""
    with one_line_errors(), suppress(KeyboardInterrupt):
        file, server = metrics_file.metrics_file(log_path), _running(url, home, config_file)
        chosen = run or metrics_file.run_of(file) or server.newest_run()
        show([f"{file}: reported to run {chosen}"])
        for record in metrics_file.records(file, on=not once):
            metrics_file.report(server, chosen, record)


@app.command()
def end(
    session: Annotated[str, typer.Argument(help="Id of a session, or of a run of it")],
    url: Url = None,
    home: Home = None,
    config_file: Config = None,
) -> None:
    """End a session, as of a script that was stopped: its models leave the trainer, its checkpoints stay."""
    with one_line_errors():
        _running(url, home, config_file).end(session.partition(":")[0])


@app.command()
def usage(
    url: Url = None,
    home: Home = None,
    config_file: Config = None,
    hours: Annotated[int, typer.Option(help="Up to now", min=1, max=336)] = 24,
    as_json: AsJson = False,
) -> None:
    """Show tokens, checkpoints and storage by owner: one's own, with an admin key those of all."""
    with one_line_errors(), understood():
        used = _running(url, home, config_file).usage(hours)
        show([json.dumps(used)] if as_json else running_server.usage_lines(used))


@app.command()
def logs(
    part: Annotated[str | None, typer.Option(help="Such as api or engine [default: all]")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Of each part", min=0, max=1_000_000)] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C")] = False,
    home: Home = None,
    config_file: Config = None,
) -> None:
    """Show the last lines of a server's logs, whether it runs or not."""
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
