"""SGLang's dialect: its requests, and answers of a real server that are kept in recorded.json."""

import json
import math
from typing import Any

import numpy as np
import pytest

from skyrl_tinker.domain.samples import VersionSpan
from skyrl_tinker.errors import NotFoundError, RequestGivenUpError, SamplerError, UserError
from skyrl_tinker.inference.client.generated import SamplerResponse
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.inference.sglang.sglang_dialect import SGLANG
from tests.inference.sglang.recording import EOS, FILE, PROMPT, REQUESTS, body_of

RECORDED: dict[str, Any] = json.loads(FILE.read_text())


def answer(name: str) -> Any:
    return json.loads(json.dumps(RECORDED[name]["answer"]))  # its own copy


def parsed(name: str, given: Any = None, model: str = BASE_MODEL) -> SamplerResponse:
    payload = answer(name) if given is None else given
    return SGLANG.parse(payload, REQUESTS[name][1], model=model, switched=False, replica=None)


def test_scores_are_those_of_the_answer() -> None:
    response, meta = parsed("scores"), answer("scores")["meta_info"]
    (sequence,) = response.sequences
    assert sequence.tokens == tuple(answer("scores")["output_ids"])
    assert sequence.logprobs == tuple(row[0] for row in meta["output_token_logprobs"])
    assert [row for (row,) in sequence.topk] == [
        (best[1], best[0]) for best, _ in meta["output_top_logprobs"]
    ]
    assert response.prompt_logprobs is not None
    assert math.isnan(response.prompt_logprobs[0])
    assert response.prompt_logprobs[1:] == tuple(row[0] for row in meta["input_token_logprobs"][1:])
    listed = [tuple((token, value) for value, token, _ in row) for row in meta["input_top_logprobs"][1:]]
    assert response.topk_prompt_logprobs == ((), *listed)
    assert (sequence.finish, sequence.versions) == ("length", (VersionSpan(BASE_MODEL, 0, 3),))


def test_the_last_scores_leave_the_first_without() -> None:
    found = parsed("the last scores").prompt_logprobs
    assert found is not None
    assert [math.isnan(each) for each in found] == [True] * (len(PROMPT) - 2) + [False] * 2


def test_targets_are_scored_at_every_position_and_the_last_tokens_as_asked() -> None:
    body, meta = body_of("targets"), answer("targets")["meta_info"]
    assert (body["token_ids_logprob"], body["logprob_start_len"]) == ([3, 7], 0)
    response = parsed("targets")
    rows = meta["input_token_ids_logprobs"]
    (three, seven), (_, second) = ([value for value, _, _ in row] for row in rows[1:3])
    last = rows[-1][0][0]
    assert response.scores is not None
    expected = [seven, three, 0, second, *[0] * 11, last]
    np.testing.assert_allclose(response.scores.targets, expected, rtol=1e-6)
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[-2:] == tuple(row[0] for row in meta["input_token_logprobs"][-2:])
    assert len(response.prompt_logprobs) == len(PROMPT)
    assert np.isnan(response.prompt_logprobs[:-2]).all()


def test_a_stop_stays_in_the_sequence() -> None:
    (sequence,) = parsed("a stop").sequences
    assert sequence.finish == "stop"
    assert sequence.tokens[-1] in (REQUESTS["a stop"][1].params.stop or ())


def test_an_aborted_sequence_has_its_tokens_and_goes_on() -> None:
    (sequence,) = parsed("aborted").sequences
    assert sequence.finish == "abort"
    assert 0 < len(sequence.tokens) == len(sequence.logprobs) < 200


def test_an_adapter_is_the_version_of_its_samples() -> None:
    (sequence,) = parsed("scores", model="v1").sequences
    assert sequence.versions == (VersionSpan("v1", 0, 3),)


def test_listed_tokens_end_a_sequence_only_while_its_own_end_does() -> None:
    assert body_of("scores")["sampling_params"]["ignore_eos"] is True  # stop=()
    stopping = body_of("a stop")["sampling_params"]
    assert "ignore_eos" not in stopping
    assert stopping["stop_token_ids"][: len(EOS)] == list(EOS)
    texts = body_of("texts")["sampling_params"]
    assert (texts["stop"], texts["skip_special_tokens"], "ignore_eos" in texts) == (
        ["qq", "zz"],
        False,
        False,
    )


def test_an_unknown_adapter_is_not_found() -> None:
    refused = RECORDED["no adapter"]
    assert isinstance(SGLANG.refusal(refused["status"], refused["answer"]), NotFoundError)
    assert isinstance(SGLANG.refusal(400, "unknown field"), UserError)
    assert type(SGLANG.refusal(500, "it failed")) is SamplerError
    given_up = "Grammar accept_token failed: ParserTooComplex"
    assert isinstance(SGLANG.refusal(500, given_up), RequestGivenUpError)


def test_numbers_that_are_none_say_that_training_has_diverged() -> None:
    for spoil in (
        {"output_token_logprobs": [[None, 1, None]]},
        {"finish_reason": {"type": "stop", "matched": "NaN happened"}},
    ):
        payload = answer("a stop")
        payload["meta_info"] |= spoil
        with pytest.raises(UserError, match="not finite"):
            parsed("a stop", payload)


def test_an_unscored_prompt_is_refused_unless_it_was_aborted() -> None:
    payload = answer("scores")
    payload["meta_info"]["input_token_logprobs"] = []
    with pytest.raises(SamplerError, match="unscored"):
        parsed("scores", payload)
    payload["meta_info"]["finish_reason"] = {"type": "abort", "message": ""}
    assert not parsed("scores", payload).scored


def test_the_trial_tells_raw_logprobs_from_processed_ones() -> None:
    payload = answer("trial")
    assert SGLANG.logprobs_mode(payload) == "raw"
    payload["meta_info"]["output_top_logprobs"] = [[[-6.238324, 1, None], [-6.238325, 2, None]]]
    assert SGLANG.logprobs_mode(payload) == "processed"
    payload["meta_info"]["output_top_logprobs"] = [[[None, 1, None], [None, 2, None]]]
    assert SGLANG.logprobs_mode(payload) is None
