"""The command behind scripts/proofs."""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiers import verdict
from tiers.jobs import ROOT, Job, pytest_job
from tiers.running import run

LISTED = ROOT / "scripts" / "proofs.toml"
MOST_S = 3 * 3600.0


@dataclass(frozen=True)
class Proof:
    """An entry of scripts/proofs.toml. `packages`: of skyrl_tinker/; `paths`: from the root."""

    name: str
    about: str
    packages: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    options: str = ""

    def jobs(self, scratch: Path) -> list[Job]:
        if self.tests:
            return [pytest_job(self.name, scratch, *self.tests, *shlex.split(self.options))]
        return [
            Job(f"{self.name} {number}", tuple(shlex.split(command)))
            for number, command in enumerate(self.commands)
        ]

    def is_about(self, path: str) -> bool:
        """Tell whether a file is among what it covers or what it runs."""
        packages = [f"skyrl_tinker/{each}" for each in self.packages]
        ran = [*self.tests, *(shlex.split(command)[0] for command in self.commands)]
        return any(Path(path).is_relative_to(each) for each in (*packages, *self.paths, *ran))


def proofs() -> dict[str, Proof]:
    return {
        name: Proof(name, **{key: _frozen(value) for key, value in entry.items()})
        for name, entry in tomllib.loads(LISTED.read_text()).items()
    }


def package_table() -> str:
    """Return the table of CONTRIBUTING.md: the proofs of each package."""
    names: dict[str, list[str]] = {}
    for proof in proofs().values():
        for package in {each.split("/")[0] for each in proof.packages}:
            names.setdefault(package, []).append(proof.name)
    rows = [f"| `{package}` | {', '.join(found)} |" for package, found in sorted(names.items())]
    return "\n".join(["| package | proofs |", "|---|---|", *rows])


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def prove(proof: Proof) -> dict[str, Any]:
    """Run it, print its output and a table, and return its line."""
    began = time.monotonic()
    found: dict[str, Any] = {"proof": proof.name, "ok": True, "core_s": 0, "reports": []}
    with tempfile.TemporaryDirectory(prefix="skyrl-tinker-proof-") as directory:
        scratch = Path(directory)
        for job in proof.jobs(scratch):
            print(f"== {proof.name}: {' '.join(job.command)}", flush=True)
            ended = run(job, scratch, began + MOST_S)
            output = ended.output.read_text(errors="replace")
            print(output, flush=True)
            found["ok"] &= ended.code == 0
            found["core_s"] += round(ended.core_s)
            if job.record:
                lines = verdict.read([job.record])
                found |= _show(lines)
                found["ok"] &= not verdict.skipped_in_vain(lines)
            elif (last := output.strip().rpartition("\n")[2]).startswith("{"):
                found["reports"].append(json.loads(last))
    return found | {"seconds": round(time.monotonic() - began), "commit": _commit()}


def _show(lines: Sequence[verdict.Line]) -> dict[str, int]:
    for line in lines:
        print(f"{line['outcome']:8} {line['seconds']:8.1f} s {line['core_s']:8.1f} core-s  {line['id']}")
    outcomes = [line["outcome"] for line in lines]
    return {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")}


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.strip()


def _changed(known: Iterable[Proof], revision: str) -> list[Proof]:
    from tiers import changed  # needs the packages of scripts/setup

    paths = changed.files(ROOT, revision)
    return [proof for proof in known if any(map(proof.is_about, paths))]


def main() -> int:
    known = proofs()
    parser = argparse.ArgumentParser(prog="scripts/proofs")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *known], default=[])
    parser.add_argument("--all", action="store_true", help="all, one after the other")
    parser.add_argument("--list", action="store_true", help="print their names and what each proves")
    parser.add_argument("--changed", nargs="?", const="origin/main", metavar="REVISION")
    parser.add_argument("--packages", action="store_true", help="print the proofs of each package")
    parser.add_argument("--json", action="store_true", help="print names as a JSON list, and run none")
    arguments = parser.parse_args()
    if arguments.packages:
        print(package_table())
        return 0
    chosen = [known[name] for name in arguments.names]
    if arguments.all:
        chosen = list(known.values())
    if arguments.changed:
        chosen = _changed(known.values(), arguments.changed)
    if arguments.json:
        print(json.dumps([proof.name for proof in chosen]))
        return 0
    if arguments.list or arguments.changed:
        for proof in chosen or known.values():
            print(f"{proof.name:16} {proof.about}")
        return 0
    if not chosen:
        parser.error("name a proof, or --all")
    found = []
    for proof in chosen:
        found.append(prove(proof))
        print(json.dumps(found[-1]), flush=True)
    if len(found) > 1:
        for line in found:
            print(f"{line['proof']:16} {'ok' if line['ok'] else 'FAILED':6} {line['seconds']:6} s")
        failed = [line["proof"] for line in found if not line["ok"]]
        print(json.dumps({"proofs": len(found), "failed": failed}))
    return 0 if all(line["ok"] for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
