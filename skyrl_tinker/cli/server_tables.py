"""Tables of `skyrl-tinker status`, `ps`, `top`, `runs`, `bases`, `usage` and `checkpoints`."""

import csv
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from io import StringIO
from typing import Any

from skyrl_tinker.cli.running_server import Facts, RunningServer
from skyrl_tinker.cli.terminal import printable, show
from skyrl_tinker.domain.units import GB, MiB, counted, duration

SILENT_S = 60.0
"""Age of a heartbeat from which on a script may have been killed."""
MOST_WEIGHTS = 3
"""Weights shown of a replica: the last."""
MOST_METADATA = 60
"""Characters shown of a run's metadata."""
_GAP = 2  # between two columns of a table
_LEAST = 8  # characters of a cell that is cut


def watch(server: RunningServer, interval_s: float, times: int | None, *, as_json: bool) -> None:
    """Print the state again and again; without `times` until Ctrl-C."""
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not as_json else ""
    count = 0
    while times is None or count < times:
        time.sleep(interval_s if count else 0.0)
        now = server.now()
        print(end=clear)
        show([json.dumps(now)] if as_json else (*status_lines(now), *process_lines(now)))
        count += 1


def status_lines(now: Facts) -> Iterator[str]:
    """Yield the server's state, problems first, then trainer, samplers and queue."""
    server = now["server"]
    for base in server["base_models"]:
        only = "" if base["trainable"] else ", sampling only"
        only = only if base["sampleable"] else ", training only"
        context = f"{base['context_length']} tokens{only}"
        stopped = f": {base['detail']}" if base["state"] == "stopped" else ""
        yield f"{base['state']:<9} {base['base_model']} on {server['device']}, {context}{stopped}"
    if now["detail"]:
        yield f"          {now['detail']}"
    for problem in now["problems"]:
        yield f"{problem['level']:<9} {problem['subject']}: {problem['text']}"
    for trainer in now["trainers"] or ():
        whose = f"of {trainer['base_model']}: " if len(now["trainers"]) > 1 else ""
        yield f"trainer   {whose}{_unit(trainer['running']) or 'waits for work'}"
        if following := _unit(trainer["following"]):
            yield f"next      {following}"
    engines = {base["base_model"]: base["sampler"] for base in server["base_models"]}
    for samplers in now["samplers"] or ():
        counts = f"{samplers['in_flight']} in flight, {samplers['waiting']} waiting"
        whose = f" of {samplers['base_model']}" if len(now["samplers"]) > 1 else ""
        yield f"samplers  {engines[samplers['base_model']]}{whose}: {counts}"
    ways = Counter(each["weights_by"] for each in now["replicas"] if each["weights_by"])
    if ways:
        to = (f"by {way} to {counted(count, 'replica')}" for way, count in ways.items())
        yield f"weights   {', '.join(to)}"
    for kind, rate in (now["rates"] or {}).items():
        yield f"{kind:<9} {rate['over_10_s']:.0f} tokens/s, {rate['over_60_s']:.0f} over a minute"
    yield from _table(
        {
            "name": each["name"] or "",
            "owner": each["owner"],
            "session": each["session_id"],
            "kind": each["kind"],
            "waiting": each["waiting"],
            "oldest": "" if each["oldest_age_s"] is None else f"{each['oldest_age_s']:.1f} s",
            "reason": each["reason"] or "",
        }
        for each in now["queue"]
    )


def base_lines(bases: Sequence[Facts]) -> Iterator[str]:
    """Yield base models with their uses, how each starts, its state, ranks and replicas, and their memory."""
    roles = (("train", "trainable"), ("sample", "sampleable"))
    yield from _table(
        {
            "base model": each["base_model"],
            "roles": ",".join(role for role, can in roles if each[can]),
            "start": each["start"],
            "state": each["state"],
            "for": "" if each["since"] is None else _since(each["since"]),
            "idle for": "" if each["idle_s"] is None else duration(each["idle_s"]),
            "ranks": each["trainer_ranks"],
            "replicas": each["replicas"] if each["sampleable"] else 0,
            **_sizes(each, bases),
            "detail": each["detail"],
        }
        for each in bases
    )


def _sizes(row: Facts, rows: Sequence[Facts]) -> dict[str, str]:
    """Return the memory of one of `rows`, as text."""
    heads = {"rss_bytes": "memory"}
    if any(each["gpu_bytes"] for each in rows):
        heads["gpu_bytes"] = "GPU memory"
    return {head: f"{row[key] / MiB:.0f} MiB" if row[key] else "" for key, head in heads.items()}


def process_lines(now: Facts) -> Iterator[str]:
    """Yield processes, for those who may see them, and replicas."""
    found = now["processes"] or ()
    yield from _table(
        {
            "process": each["name"],
            "pid": each["pid"],
            **_sizes(each, found),
            "CPU": f"{each['cpu_percent']:.0f} %",
            "age": f"{each['age_s']:.0f} s",
        }
        for each in found
    )
    if memory := now["memory"]:
        free, total = (memory[name] / GB for name in ("available_bytes", "total_bytes"))
        yield f"{free:.1f} of {total:.1f} GB of its host's memory are available"
        for place, gpu in enumerate(memory["gpus"]):
            used, total = (gpu[name] / GB for name in ("used_bytes", "total_bytes"))
            yield f"{used:.1f} of {total:.1f} GB of GPU {place} are in use"
    yield from _table(
        {
            "base model": each["base_model"],
            "replica": each["address"] or "",
            "host": each["host"] or "",
            "state": each["state"],
            "weights": _weights(each["weights"]),
            "weights by": each["weights_by"] or "",
            "adapters by": each["adapters_by"] or "",
        }
        for each in now["replicas"]
    )


def _weights(names: Sequence[str]) -> str:
    shown, more = " ".join(names[-MOST_WEIGHTS:]), len(names) - MOST_WEIGHTS
    return f"{shown} and {more} more" if more > 0 else shown or "base"


def run_lines(runs: Facts, columns: int | None = None) -> Iterator[str]:
    """Yield the runs, and the reasons of those that failed, are lost or parked.

    `columns`: of the terminal, into which the table is fitted; None: it is whole.
    """
    shown = [run for run in runs["runs"] if not _of_command(run)]
    projects = any(run["project_id"] for run in shown)
    rows = [
        {
            "name": run["name"] or "",
            "state": _state(run),
            "steps": run["steps_before"] + run["steps"],
            "reward": "" if run["reward"] is None else f"{run['reward']:.4g}",
            "loss": "" if run["loss"] is None else f"{run['loss']:.4g}",
            "last request": f"{_since(run['last_request_at'])} ago",
            **({"project": run["project_id"] or ""} if projects else {}),
            "owner": run["owner"],
            "run": run["run_id"],
            "hyperparameters": _hyperparameters(run),
            "metadata": _metadata(run["user_metadata"]),
        }
        for run in shown
    ]
    yield from _table(rows, columns) if rows else ("there are no runs",)
    if hidden := len(runs["runs"]) - len(shown):
        yield f"and {hidden} of the tinker command without steps, which --json has"
    if more := runs["total"] - len(runs["runs"]):
        yield f"and {more} more"
    ended: dict[tuple[str, str], list[str]] = {}  # one cause may end many
    for run in runs["runs"]:
        if run["state"] in ("failed", "lost", "parked"):
            reason = run["state_reason"].removeprefix(f"model {run['run_id']} is {run['state']}: ")
            ended.setdefault((run["state"], reason), []).append(run["run_id"])
    for (state, reason), ids in ended.items():
        yield f"{', '.join(ids)} {'is' if len(ids) == 1 else 'are'} {state}: {reason}"


def checkpoint_lines(found: Sequence[Facts]) -> Iterator[str]:
    """Yield checkpoints and their sum."""
    yield from _table(
        {
            "checkpoint": each["tinker_path"],
            "owner": each["owner"],
            "size": f"{each['size_bytes'] / GB:,.3f} GB",
            "saved (UTC)": each["time"][:19],
            "expires (UTC)": (each["expires_at"] or "never")[:19],
            "public": "yes" if each["public"] else "",
        }
        for each in found
    )
    size = sum(each["size_bytes"] for each in found) / GB
    yield f"{counted(len(found), 'checkpoint')}, {size:,.3f} GB"


def usage_by_day(parts: Iterable[Facts]) -> Iterator[str]:
    """Yield lines of CSV: amounts by day (in UTC), owner, project, base model and kind."""
    totals: Counter[tuple[str, ...]] = Counter()
    for event in (event for part in parts for event in part["data"]):
        kind, amount = _amount(event["event_info"])
        of = event["user_name"], event["project_id"] or "", event["base_model"], kind
        totals[event["bucket_start"][:10], *of] += amount
    lines = StringIO()
    writer = csv.writer(lines)
    writer.writerow(("day", "owner", "project", "base_model", "kind", "amount"))
    writer.writerows((*key, f"{amount:.15g}") for key, amount in sorted(totals.items()))
    yield from lines.getvalue().splitlines()


def usage_lines(usage: Facts) -> Iterator[str]:
    """Yield tokens, checkpoints and storage by owner and kind."""
    totals: Counter[tuple[str, str]] = Counter()
    for event in usage["data"]:
        kind, amount = _amount(event["event_info"])
        totals[event["user_name"], kind] += amount
    rows = [
        {"owner": owner, "kind": kind, "amount": _number(amount)}
        for (owner, kind), amount in sorted(totals.items())
    ]
    yield from _table(rows) if rows else ("nothing was used",)


def _number(amount: float) -> str:
    """Return a count whole, and GB hours to a thousandth."""
    if isinstance(amount, int):
        return f"{amount:,}"
    return f"{amount:,.3f}" if amount >= 0.001 else "under 0.001"


def _amount(event: Facts) -> tuple[str, Any]:
    match event["type"]:
        case "training":
            return "trained tokens", event["token_count"]
        case "sampling_prefill":
            return f"prompt tokens{', cached' if event['cached'] else ''}", event["token_count"]
        case "sampling_sample":
            return "sampled tokens", event["token_count"]
        case "checkpoint":
            return "checkpoints", event["count"]
        case kind:
            return f"{kind}, GB hours", event["gigabyte_hours"]


def _of_command(run: Facts) -> bool:
    creator: str = run["user_metadata"].get("created_by", "")
    return run["steps"] == 0 and creator.startswith("tinker ")


def _state(run: Facts) -> str:
    """Return it, of one in training with the silence of its script."""
    heartbeat: str = run["last_heartbeat_at"]
    silent = run["state"] in ("creating", "ready") and _age_s(heartbeat) > SILENT_S
    return f"{run['state']}, silent for {_since(heartbeat)}" if silent else str(run["state"])


def _since(moment: str) -> str:
    return duration(max(1.0, _age_s(moment)))


def _age_s(moment: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


def _hyperparameters(run: Facts) -> str:
    rank, last = run["lora_rank"], run["last"] or {}
    config = ",".join(f"{name}={value:.6g}" for name, value in run["loss_fn_config"].items())
    rate = last.get("learning_rate")
    known = {
        "base": run["base_model"],
        "rank": "full" if rank == 0 else rank,
        "lr": None if rate is None else f"{rate:.4g}",
        "datums": last.get("datums"),
        "loss": run["loss_fn"] and run["loss_fn"] + (config and f"({config})"),
        "from": run["parent"] and f"{run['parent']}@{run['steps_before']}",
    }
    return " ".join(f"{name}={value}" for name, value in known.items() if value is not None)


def _metadata(metadata: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in metadata.items())[:MOST_METADATA]


def _unit(unit: Facts | None) -> str | None:
    if unit is None:
        return None
    models = len(unit["model_ids"]) + unit["others"]
    known = (name or model_id for name, model_id in zip(unit["names"], unit["model_ids"], strict=True))
    whose = f" ({', '.join(known)})" if unit["model_ids"] else ""
    since = "" if unit["running_s"] is None else f" for {unit['running_s']:.1f} s"
    return f"{unit['kind']} of {counted(models, 'model')}{whose}{since}"


def _table(rows: Iterable[Mapping[str, Any]], columns: int | None = None) -> Iterator[str]:
    """Yield a table of cells by heads, fitted into so many `columns` of a terminal; without rows none."""
    if not (found := list(rows)):
        return
    heads = list(found[0])
    cells = [list(map(printable, row)) for row in (heads, *(list(row.values()) for row in found))]
    whole = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths = whole if columns is None else _fitting(whole, columns)
    yield ""
    for row in cells:
        yield "  ".join(map(_fitted, row, widths)).rstrip()
    if left_out := heads[len(widths) :]:
        yield f"no room for {', '.join(left_out)}: a wider terminal shows them, and a pipe (| cat)"


def _fitting(widths: Sequence[int], columns: int) -> list[int]:
    """Return the widths of the first cells of a row, the last of which is cut.

    The first, a name, has a third of the row where not all fit.
    """
    if sum(widths) + _GAP * (len(widths) - 1) <= columns:
        return list(widths)
    fitting, left = list[int](), columns
    for width in (min(widths[0], columns // 3), *widths[1:]):
        fitting += [min(width, left)] if left >= min(width, _LEAST) else []
        left -= width + _GAP
    return fitting


def _fitted(cell: str, width: int) -> str:
    """Return a cell, or its beginning, as wide as its column."""
    return cell.ljust(width) if len(cell) <= width else f"{cell[: width - 1]}…"
