"""Client of samplers, and servers of others, with the dialect of vLLM: the stand-ins speak it as well."""

from functools import partial

from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.servers.external_servers import ExternalServers
from skyrl_tinker.inference.vllm.vllm_dialect import VLLM

vllm_client = partial(RemoteInferenceClient, dialect=VLLM)
vllm_servers = partial(ExternalServers, dialect=VLLM)
