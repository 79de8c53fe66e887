"""What was made, listed and managed. Runs after steps.py."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tinker import types
from world import PATIENCE_S, Run, done, order, sample, step


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return bytes(answer.read())


def cli(run: Run, *arguments: str) -> str:
    """Run this version's own `tinker` command and return its output.

    Once more if Python aborted, as it may at its end while a thread of the SDK writes (python/cpython#86883).
    """
    command = [str(Path(sys.executable).with_name("tinker")), "--format", "json", *arguments]
    environment = {**os.environ, "TINKER_BASE_URL": run.url}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode == -signal.SIGABRT:
        print(f"aborted, run again: {command}\n{ended.stderr}", file=sys.stderr)
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    ended.check_returncode()
    return ended.stdout


@step()
def runs(run: Run) -> None:
    listed = done(run.rest.list_training_runs(limit=5)).training_runs
    assert run.run_id in [one.training_run_id for one in listed]
    found = done(run.rest.get_training_run_by_tinker_path(run.saved))
    assert (found.training_run_id, found.lora_rank) == (run.run_id, 8)
    assert found.user_metadata == {"made_by": run.name}
    assert found.last_checkpoint.tinker_path == run.saved


@step()
def checkpoints(run: Run) -> None:
    listed = done(run.rest.list_checkpoints(run.run_id)).checkpoints
    found = {one.tinker_path: one.checkpoint_type for one in listed}
    assert found == {run.saved: "training", run.saved_sampler: "sampler"}, found


@step(since="0.28")
def external(run: Run) -> None:
    """Stays, for the listings of the versions that do not know of such checkpoints."""
    path = str(done(run.training.save_weights_external(name=run.name)).path)
    answer = done(run.rest.get_external_weights_urls(path))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(answer.urls)
    assert b"peft_type" in fetch(answer.urls["adapter_config.json"])
    listed = done(run.rest.list_checkpoints(run.run_id)).checkpoints
    assert path in [one.tinker_path for one in listed if one.checkpoint_type == "external"]


@step(since="0.4")
def user_checkpoints(run: Run) -> None:
    listed = done(run.rest.list_user_checkpoints(limit=200)).checkpoints
    assert {run.saved, run.saved_sampler} <= {one.tinker_path for one in listed}


@step(since="0.4")
def publish(run: Run) -> None:
    for call, public in (("publish", True), ("unpublish", False)):
        done(getattr(run.rest, f"{call}_checkpoint_from_tinker_path")(run.saved))
        listed = done(run.rest.list_checkpoints(run.run_id)).checkpoints
        assert {one.public for one in listed if one.tinker_path == run.saved} == {public}


@step(since="0.13")
def ttl(run: Run) -> None:
    for seconds in (7200, None):
        done(run.rest.set_checkpoint_ttl_from_tinker_path(run.saved_sampler, seconds))
    if order(run.version) >= order("0.15"):
        done(run.training.save_state(name=f"{run.name}-brief", ttl_seconds=3600))


@step()
def delete(run: Run) -> None:
    path = str(done(run.training.save_state(name=f"{run.name}-gone")).path)
    done(run.rest.delete_checkpoint_from_tinker_path(path))
    listed = done(run.rest.list_checkpoints(run.run_id)).checkpoints
    assert path not in [one.tinker_path for one in listed]


@step(since="0.6")
def weights_info(run: Run) -> None:
    found = run.rest.get_weights_info_by_tinker_path(run.saved)
    found = done(found)
    assert (found.base_model, found.lora_rank) == (run.model, 8)


@step(since="0.5")
def sessions(run: Run) -> None:
    assert run.session_id in done(run.rest.list_sessions(limit=5)).sessions
    assert run.run_id in done(run.rest.get_session(run.session_id)).training_run_ids


@step(since="0.6")
def samplers(run: Run) -> None:
    ids = done(run.rest.get_session(run.session_id)).sampler_ids
    found = [done(run.rest.get_sampler(one)) for one in ids]
    assert run.saved_sampler in [one.model_path for one in found]
    assert {one.base_model for one in found} == {run.model}


@step(until="0.36", broken=("0.22.0",))
def archive(run: Run) -> None:
    answer = done(run.rest.get_checkpoint_archive_url_from_tinker_path(run.saved_sampler))
    with tarfile.open(fileobj=io.BytesIO(fetch(answer.url))) as tar:
        names = {name.rpartition("/")[2] for name in tar.getnames()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names, names


@step(since="0.8")
def cli_lists(run: Run) -> None:
    assert run.run_id in cli(run, "run", "list", "--limit", "5")
    assert run.saved in cli(run, "checkpoint", "list", "--run-id", run.run_id)


@step(since="0.8", broken=("0.22.0",))
def cli_download(run: Run) -> None:
    """Download an archive of the sampler's weights; from 0.36 on files, made from the training weights."""
    path = run.saved if order(run.version) >= order("0.36") else run.saved_sampler
    with tempfile.TemporaryDirectory() as directory:
        cli(run, "checkpoint", "download", path, "--output", directory)
        names = {found.name for found in Path(directory).rglob("*")}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names, names


@step(since="0.22")
def project(run: Run) -> None:
    done(run.rest.assign_session_project(run.session_id, "compat"))


@step(since="0.20")
def audit(run: Run) -> None:
    entries = done(run.rest.get_audit_log(event_type="checkpoints")).entries
    assert run.saved in [entry.tinker_path for entry in entries]


@step(since="0.24")
def trace(run: Run) -> None:
    events = json.loads(fetch(done(run.rest.export_session_trace(run.session_id))))
    assert {"optim_step", "sample"} <= {event["name"].partition(" ")[0] for event in events}


@step(since="0.24")
def billing(run: Run) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    usage = done(run.rest.get_billing_usage(hour - timedelta(hours=1), hour + timedelta(hours=1)))
    kinds = {event.event_info.type for event in usage.data if event.session_id == run.session_id}
    assert {"training", "sampling_sample"} <= kinds, kinds


@step(since="0.32")
def storage(run: Run) -> None:
    assert sum(row.checkpoint_count for row in done(run.rest.get_current_checkpoint_storage_usage()).data)


@step(since="0.36")
def search(run: Run) -> None:
    found = done(run.rest.search_sessions(types.SessionSearchRequest(session_id=run.session_id))).sessions
    assert [one.session_id for one in found] == [run.session_id]


@step(since="0.27")
def copy(run: Run) -> None:
    copied = done(run.service.copy_weights(run.saved_sampler))
    sampler = done(run.service.create_sampling_client(model_path=copied))
    assert sample(sampler).sequences[0].tokens == sample(run.sampler).sequences[0].tokens


@step(since="0.24")
def whoami(run: Run) -> None:
    assert done(run.rest.whoami()).user_urn


@step(since="0.27")
def finish(run: Run) -> None:
    run.service.close(status="success")
