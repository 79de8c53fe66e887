"""What a user's script does, with whichever SDK this interpreter has: `script.py URL MODEL`.

Prints one JSON object per step: its name, ok | absent | failed, and why. `absent` is what no public class
of this version can do, by the ranges that the steps name; what is within its range has to work.
Knows nothing but the SDK and the standard library: it runs in venvs that hold nothing else.
"""

import json
import os
import sys
import traceback
import warnings
from importlib.metadata import version

import rest_steps
import steps
from world import Run, Step, UnavailableError, steps_of


def main(url: str, model: str) -> None:
    warnings.simplefilter("ignore")  # old SDKs on new libraries
    number = version("tinker")
    run = Run(url, model, number)
    for step in (*steps_of(steps), *steps_of(rest_steps)):
        state, why = _outcome(step, run)
        print(json.dumps({"step": step.name, "state": state, "why": why}), flush=True)


def _outcome(step: Step, run: Run) -> tuple[str, str]:
    if not step.covers(run.version):
        return "absent", ""
    try:
        step.work(run)
    except UnavailableError as reason:
        return "absent", str(reason)
    except Exception as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}"
    return "ok", ""


if __name__ == "__main__":
    main(*sys.argv[1:])
    # The interpreter's own end is not asked: an answer that arrives in it (of a heartbeat) makes the SDK's
    # transport, pyqwest, abort the process.
    sys.stderr.flush()
    os._exit(0)
