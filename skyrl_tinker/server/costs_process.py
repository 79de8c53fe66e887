"""Process that measures the memory costs of base models: it takes torch, which `serve` does not import.

`python -m skyrl_tinker.server.costs_process`: for each line of stdin, a JSON object, one to stdout.
"""

import json
import os
import sys
from dataclasses import asdict

from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import StartupError
from skyrl_tinker.system.processes import gc_paused


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tensors without content lie on no GPU
    answers, sys.stdout = sys.stdout, sys.stderr  # where libraries may print
    with gc_paused():
        from skyrl_tinker.training.memory.row_costs import measure_costs
        from skyrl_tinker.training.memory.row_profile import Training, fake_ranks
    for request in map(json.loads, sys.stdin):
        training = Training(request["config"], "cuda", "bfloat16", LoraSpec(request["rank"], 0))
        try:
            with fake_ranks(request["ranks"]) as ranks:
                costs = measure_costs(training, request["tokens"], ranks)
        except StartupError as error:
            sys.exit(str(error))
        print(json.dumps(asdict(costs)), file=answers, flush=True)


if __name__ == "__main__":
    main()
