"""/metrics, and the gap between samplers and trainer: in numbers, in a step's metrics, and as a warning."""

import re
import time
from collections import defaultdict
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families
from tinker import types

from tests.e2e.support.client import Client, gap_of_next_step, metrics_of, prompt, random_tokens, train
from tests.support.collector import Collector, values

DOCKER = Path(__file__).parents[2] / "docker"
TOKENS = random_tokens(40, seed=5)


def scraped(url: str) -> dict[str, float]:
    """Samples without labels by name; labelled ones as name/value/value, but for the one base model."""
    families = text_string_to_metric_families(metrics_of(url))
    return {
        "/".join((sample.name.removeprefix("skyrl_tinker_"), *_told(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def _told(labels: dict[str, str]) -> list[str]:
    return [value for name, value in labels.items() if name != "base_model"]


def test_requests_tokens_and_the_busy_fraction_are_counted(client: Client) -> None:
    training = client.new_lora()
    before = scraped(client.url)
    train(training, TOKENS)
    sampler = training.save_weights_and_get_sampling_client().result()
    sampler.sample(prompt(TOKENS), 2, types.SamplingParams(max_tokens=8, stop=[])).result()
    after = scraped(client.url)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("requests_total/forward_backward/ok") == 1
    assert grown("requests_total/sample/ok") == 1
    assert grown("request_seconds_count/optim_step") == 1
    assert grown("trained_tokens_total/forward_backward") == len(TOKENS) - 1
    assert grown("sampled_tokens_total") >= 16
    assert grown("publish_seconds_count/lora") == 1
    assert grown("unit_tokens_count") == 1
    assert grown("queue_wait_seconds_count/sample") == 1
    assert grown("unit_seconds_count/pass") == grown("unit_seconds_count/optim_step") == 1
    assert 0 < grown("unit_seconds_sum/pass") < grown("request_seconds_sum/forward_backward")
    assert grown("http_request_seconds_count/POST//api/v1/forward_backward/2xx") == 1
    assert grown("http_request_seconds_count/POST//api/v1/optim_step/2xx") == 1
    assert grown("trainer_busy_seconds_total") > 0
    assert grown("trainer_waiting_seconds_total") > 0
    assert after["replicas"] == after["replicas_expected"] == 1
    assert after["engine_up"] == 1
    assert after["ready"] == 1
    assert {after["requests_pending/sample"], after["samples_in_flight"], after["samples_queued"]} == {0}
    assert after["training_backlog_tokens"] == 0
    assert after.get("sampler_logprob_gap", 0.0) < after["sampler_logprob_gap_bound"]
    assert after["disk_free_bytes"] > after["disk_least_bytes"] > 0
    assert after["next_key_expiry_timestamp_seconds"] == float("inf")


def test_a_collector_gets_each_request_with_what_ran_for_it(client: Client, collector: Collector) -> None:
    training = client.new_lora()
    train(training, TOKENS)
    sampler = training.save_weights_and_get_sampling_client().result()
    sampler.sample(prompt(TOKENS), 1, types.SamplingParams(max_tokens=8, stop=[])).result()
    model = training.get_info().model_id
    wanted = {"create_model", "forward_backward", "optim_step", "save_weights_for_sampler"}
    found: dict[str, Span] = {}
    deadline = time.monotonic() + 30
    while not wanted <= found.keys():
        assert time.monotonic() < deadline, found.keys()
        time.sleep(0.5)
        roots = [span for span in collector.spans if not span.parent_span_id]
        found = {span.name: span for span in roots if values(span.attributes).get("model") == model}
    assert {"wait", "run"} <= collector.trace(found["forward_backward"].trace_id.hex()).keys()
    assert "publish" in collector.trace(found["save_weights_for_sampler"].trace_id.hex())
    assert {"unit forward_backward", "rank 0 run_pass"} <= {span.name for span in collector.spans}
    named = [values(span.attributes).get("replicas") for span in collector.spans if span.name == "run"]
    assert any(str(each).startswith("127.0.0.1:") for each in named), "which replica answered a sample"


@pytest.mark.parametrize("rank", [8, 0])
def test_each_sync_tells_the_gap_in_the_next_step(client: Client, rank: int) -> None:
    training = client.new_lora(rank=rank)
    train(training, TOKENS, 1e-2 if rank else 1e-3)
    training.save_weights_for_sampler("compared").result()
    gap = gap_of_next_step(training, TOKENS)
    assert 0 <= gap < 1e-3
    after = scraped(client.url)
    assert after["sampler_logprob_gap_max"] >= gap
    assert after["sampler_logprob_gap_nats_count"] >= 1
    if not rank:
        assert after["weight_sync_seconds_sum"] > after["weight_sync_pause_seconds_sum"] > 0


def by_replica(url: str, name: str) -> dict[str, float]:
    """Sums of one of vLLM's metrics."""
    sums: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics_of(url)):
        for sample in family.samples:
            if sample.name == f"vllm:{name}":
                sums[sample.labels["replica"]] += sample.value
    return dict(sums)


def test_vllm_s_own_metrics_come_with_the_number_of_their_replica(client: Client) -> None:
    before = by_replica(client.url, "generation_tokens_total")
    sampler = client.base_sampler()
    sampler.sample(prompt(TOKENS), 1, types.SamplingParams(max_tokens=8, stop=[])).result()
    after = by_replica(client.url, "generation_tokens_total")
    assert before.keys() == after.keys() == {"0"}
    assert after["0"] - before["0"] >= 8
    assert by_replica(client.url, "e2e_request_latency_seconds_count")["0"] >= 1


def test_each_metric_is_told_once(client: Client) -> None:
    told = re.findall(r"# TYPE (\S+)", metrics_of(client.url))
    assert len(told) == len(set(told)), {name for name in told if told.count(name) > 1}
    assert not [name for name in told if name.startswith("vllm:") and name.endswith("_created")]


def test_alerts_and_the_dashboard_of_grafana_ask_for_metrics_that_are_there(client: Client) -> None:
    asking = [DOCKER / "prometheus" / "alerts.yml", DOCKER / "grafana" / "dashboard.json"]
    asked = {
        name for path in asking for name in re.findall(r"\b(?:skyrl_tinker_|vllm:)\w+", path.read_text())
    }
    told = set(re.findall(r"# TYPE (\S+)", metrics_of(client.url)))
    assert {re.sub("_(bucket|count|sum)$", "", name) for name in asked} <= told
