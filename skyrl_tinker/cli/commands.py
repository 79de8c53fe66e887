"""The command line: to serve, to look at a running server, to plan, to make models, keys and more."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from skyrl_tinker import __version__, config
from skyrl_tinker.cli import database, keys, server_commands
from skyrl_tinker.cli.options import (
    Config,
    SettingsCommand,
    as_settings,
    one_line_errors,
    path,
    with_options,
    with_settings,
)
from skyrl_tinker.cli.terminal import tell
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.units import GB, counted
from skyrl_tinker.server.base_models.tiny_families import FAMILIES

# no markup: it would take "[default: 8000]" for a style and drop it
app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
app.add_typer(database.app, name="db")
app.add_typer(keys.app, name="keys")
app.add_typer(server_commands.app)


def _version(requested: bool) -> None:
    if requested:
        print(f"skyrl-tinker {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Serve the Tinker API on your own machines."""


@app.command(cls=SettingsCommand)
@with_settings(*Settings.model_fields)
def serve(
    settings: Settings,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print all settings as a file for --config, and end")
    ] = False,
) -> None:
    """Run a server until Ctrl-C. Every setting also as SKYRL_TINKER_… and in --config FILE.toml."""
    from skyrl_tinker.cli import settings_output  # the other commands need none of these imports
    from skyrl_tinker.server import supervisor

    if show_config:
        print(settings_output.as_toml(settings))
        return
    supervisor.serve(
        settings,
        ready=lambda text: print(text, flush=True),
        progress=lambda text: tell(*text.split("\n")),
        warn=lambda text: tell(f"warning: {text}"),
    )


@app.command()
@with_settings(
    "host", "port", "allowed_hosts", "tls_cert", "tls_key", "insecure", "home", "database_url", "checkpoints"
)
def api(settings: Settings) -> None:
    """Answer clients on another host than the engine's.

    Runs until Ctrl-C. Needs PostgreSQL, no torch, no sampler. Its settings are those of the server on
    --database-url, except for options given here. --home has a copy of signing-secrets.json of that server's
    home.
    """
    from skyrl_tinker.server import api_host

    api_host.serve_api(settings, ready=lambda text: print(text, flush=True), progress=tell)


@app.command()
def engine(
    settings_file: Annotated[
        Path, typer.Argument(help="<home>/run/settings.json", exists=True, dir_okay=False)
    ],
) -> None:
    """Run the engine alone, as `serve` does; for debugging."""
    with one_line_errors():
        database.existing_database(config.read_back(settings_file))
    os.execv(sys.executable, [sys.executable, "-m", "skyrl_tinker.engine.engine_process", str(settings_file)])


@app.command(cls=SettingsCommand)
@with_options("sampler_engine", "sampler_python")
def demo(
    out: Annotated[Path, typer.Option(help="Directory of reward.png and metrics.jsonl", parser=path)] = Path(
        "demo-out"
    ),
    seed: Annotated[
        int, typer.Option(help="Of the adapter, and of samples if their engine has seeds", min=0)
    ] = 0,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of the optimizer [default: 40, of other families than qwen3 70]", min=8),
    ] = None,
    arch: Annotated[str, typer.Option(help=f"Family of the policy: {', '.join(FAMILIES)}")] = "qwen3",
    **engine: Any,
) -> None:
    """Start a server, train a policy on it, stop it. Exit code 1: the reward did not rise."""
    from skyrl_tinker.cli.demo import run_demo

    with one_line_errors():
        learned = run_demo(out, seed, steps or (40 if arch == "qwen3" else 70), arch, **engine)
    if not learned:
        raise typer.Exit(1)


@app.command()
def make_model(
    directory: Annotated[
        Path, typer.Argument(help="Where config, weights and tokenizer go; made if need be", parser=path)
    ],
    arch: Annotated[str, typer.Option(help=f"Family, one of {', '.join(FAMILIES)}")] = "qwen3",
    hidden: Annotated[int, typer.Option(help="Width of the layers, a multiple of 64")] = 192,
    layers: Annotated[int, typer.Option(help="Number of decoder layers")] = 2,
    vocab: Annotated[int, typer.Option(help="Tokens of the vocabulary, at least 259")] = 512,
    untied: Annotated[
        bool, typer.Option("--untied", help="With a separate lm_head, as a gpt-oss always")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random weights", min=0)] = 0,
) -> None:
    """Write a small untrained model to DIRECTORY.

    It has a tokenizer and a chat template of its own. A qwen2 and a mistral have a sliding window of 16
    tokens in all layers, a gemma3 and a gpt-oss in every other.
    """
    from skyrl_tinker.server.base_models import tiny_model

    with one_line_errors():
        tiny_model.make_model(
            directory, arch=arch, hidden=hidden, layers=layers, vocab=vocab, tied=not untied, seed=seed
        )
    print(directory.absolute())


@app.command()
@with_settings("home", "database_url", "checkpoints")
def import_adapter(
    settings: Settings,
    directory: Annotated[
        Path, typer.Argument(help="Has adapter_config.json and adapter_model.safetensors", parser=path)
    ],
    name: Annotated[str | None, typer.Option(help="Checkpoint name [default: the directory's]")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="As for serve [default: the last one served from this home]")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Name of the API key that owns it; required once there are keys")
    ] = None,
) -> None:
    """Make a checkpoint to train on of a PEFT LoRA adapter.

    Prints its tinker:// path. A server may be running on the same home. For example:

    \b
      skyrl-tinker import-adapter ./my-adapter --name start
      training = service_client.create_training_client_from_state("tinker://…/weights/start")
    """
    from skyrl_tinker.cli import import_adapter as importing

    with database.told_if_new(settings):
        print(importing.import_adapter(directory, settings, name=name, served=base_model, key=key))


@app.command()
@with_options(
    "context_length",
    "max_lora_rank",
    "trainer_ranks",
    "replicas",
    "tensor_parallel_size",
    "placement",
    "token_budget",
    "gradient_checkpointing",
    "resident_models",
    "bases",
)
def plan(
    config_file: Config = None,
    gpus: Annotated[int, typer.Option(help="GPUs to plan for", min=1, max=64)] = 1,
    gpu_memory: Annotated[float, typer.Option(help="GB of each GPU", min=1)] = 80,
    tenants: Annotated[int, typer.Option(help="Models in training at once", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
    base_model: Annotated[
        str | None,
        typer.Option(help="A directory with config.json, or a hub name [default: that of --config]"),
    ] = None,
    **given: Any,
) -> None:
    """Show which `serve` fits on GPUs, before there are any.

    Prints the command to copy. Options that are given are kept, as are settings of --config and the
    environment; the others have the defaults of `serve`. Exit code 1 if it does not fit. Each base model of
    --also has GPUs of its own, one for training and one for sampling as its roles say, or as many as its
    table [bases.NAME] in the file says; --base-model has the rest. Of those on demand (--also
    NAME:train,on_demand) the largest counts alone. The trainer's forward and backward run on tensors without
    content, which takes seconds on a CPU and no weights: config.json is enough.
    """
    from skyrl_tinker.cli import plan_output
    from skyrl_tinker.server import start_plan

    def measured(config: Any, demand: Any, ranks: int) -> Any:
        on = counted(ranks, "trainer rank")
        tell(f"counting the memory of a row of {demand.longest_row} tokens on {on}: some ten seconds")
        return measuring.costs(config, demand, ranks)

    with one_line_errors(), start_plan.CostsProcess() as measuring:
        given = {"base_model": base_model, **as_settings(given), "device": "cuda"}
        if not config.load(config_file, **given).plan:  # of the file or the environment
            given["plan"] = True
        settings = config.load(config_file, **given)
        start_plan.require_planned(settings)
        serve = plan_output.serve_line(config_file, given)
        told: list[str] = []
        there = start_plan.Gpus(gpus, gpu_memory * GB)
        placed, left, further = start_plan.beside_further(settings, there, measured, told.append)
        found = start_plan.plan(settings, left, measured, tenants=tenants)
    if as_json:
        print(plan_output.as_json(found, placed, further, left.count, serve))
    else:
        print("\n\n".join((*told, plan_output.as_table(found, placed, further, left.count, serve))))
    if found.problem is not None:
        raise typer.Exit(1)


@app.command(cls=SettingsCommand)
@with_settings(*Settings.model_fields)
def doctor(settings: Settings) -> None:
    """Check whether `serve` would work here with these options. Names fixes; exit code 1 if not."""
    import psutil

    from skyrl_tinker.cli import doctor as checks

    if not checks.report(settings, time.time() - psutil.Process().create_time()):
        raise typer.Exit(1)
