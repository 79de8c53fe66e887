"""Process of vllm-router, with a setting that its command line lacks: the check of clients' tokens.

`python -m skyrl_tinker.inference.servers.router_process FLAG...`. TOKEN is in the environment: all users can
read the arguments of a process.
"""

import os
import sys

from vllm_router.launch_router import launch_router, parse_router_args  # type: ignore[import-untyped]

from skyrl_tinker.inference.constants import KEY_CHECK, TOKEN


def main() -> None:
    args = parse_router_args(sys.argv[1:])
    args.api_key = os.environ[TOKEN]  # sent to the servers, on all routes
    args.api_key_validation_urls = [os.environ[KEY_CHECK]]
    args.vllm_pd_disaggregation = bool(args.prefill_urls)
    launch_router(args)


if __name__ == "__main__":
    main()
