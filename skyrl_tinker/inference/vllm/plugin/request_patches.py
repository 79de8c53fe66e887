"""Patches of how vLLM answers a request."""

from typing import Any

from skyrl_tinker.inference.vllm.plugin.replacement import replaces


def count_cached_prompts_once() -> None:
    """Report the smallest count of cached tokens among n sequences, that of the first to be prefilled.

    Stock vLLM reports the count of the last to end, which includes tokens cached by its siblings.
    """
    from vllm.v1.engine.output_processor import RequestState

    @replaces(RequestState)
    def make_request_output(make: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        parent = self.parent_req
        if parent is not None:
            fewest = min(self.num_cached_tokens, getattr(parent, "fewest_cached", self.num_cached_tokens))
            parent.fewest_cached = self.num_cached_tokens = fewest
        return make(self, *args, **kwargs)


def keep_request_ids() -> None:
    """Take the id of a request from its body, so that it can be aborted by this id.

    Stock vLLM prefers the header, in which a router with disaggregation sends another id.
    """
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    @replaces(ServingTokens)
    def _base_request_id(name: Any, raw_request: Any, default: str | None = None) -> Any:
        return default or name(raw_request)
