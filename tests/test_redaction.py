"""Secrets do not stand in messages, and other text does."""

import logging
import sys
from pathlib import Path

import pytest

from skyrl_tinker.domain.manifest import read_manifest
from skyrl_tinker.errors import NotFoundError, OverloadedError, UserError
from skyrl_tinker.redaction import RedactingFormatter, redact, without_paths

KEY = "tml-" + "aB3_-" * 8 + "xyz"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJwYXNzcG9ydCJ9.c2lnbmF0dXJl-_"
SIGNATURE = "0123456789abcdef" * 4


@pytest.mark.parametrize("secret", [KEY, JWT, KEY[:30]])
@pytest.mark.parametrize("text", ["{}", "no session {}", "found '{}', expected", "a/{}/b?x={}", "Bearer {}."])
def test_keys_and_tokens_are_left_out(secret: str, text: str) -> None:
    said = redact(text.format(*[secret] * 2))
    assert "[secret]" in said
    assert not any(part in said for part in secret.split("."))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"token hf_{'aB3' * 11}x", "token [secret]"),
        (f"found 'AGE-SECRET-KEY-1{'QPZRY9X8' * 7}'", "found '[secret]'"),
        ("key AKIAIOSFODNN7EXAMPLE.", "key [secret]."),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfi", "AWS_SECRET_ACCESS_KEY=[secret]"),
        ("{'aws_session_token': 'FQoGZXIvYXdzEJr//////'}", "{'aws_session_token': '[secret]'}"),
    ],
)
def test_keys_of_others_are_left_out(text: str, said: str) -> None:
    assert redact(text) == said


def test_signatures_of_urls_are_left_out() -> None:
    said = redact(f"GET /download/trace/s?expires=1&signature={SIGNATURE} HTTP/1.1")
    assert said == "GET /download/trace/s?expires=1&signature=[secret] HTTP/1.1"


@pytest.mark.parametrize(
    "text",
    [
        "TINKER_API_KEY=tml-local",
        "tinker://8d7f4f2e-7d5b-4c3a-9a51-000000000000:train:0/weights/a",
        "no key with the id '3': see `skyrl-tinker keys list`",
        "key eyJ",
        "model hf_internal, and user_metadata.aws_secret_access_key: Input should be a valid string",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == text


def test_our_errors_are_without_secrets() -> None:
    assert str(NotFoundError(f"no session {KEY}")) == "not found: no session [secret]"
    assert str(OverloadedError(f"wait, {JWT}", 1)) == "wait, [secret]"


def test_log_lines_and_tracebacks_are_without_secrets() -> None:
    try:
        raise ValueError(KEY)
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "told %s", (JWT,), sys.exc_info())
    text = RedactingFormatter("%(message)s").format(record)
    assert text.startswith("told [secret]\nTraceback")
    assert text.endswith("ValueError: [secret]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "checkpoint /srv/h/checkpoints/20/s~124: lora_A: found None",
            "checkpoint …/s~124: lora_A: found None",
        ),
        ("[Errno 2] No such file: '/srv/my home/a/b.json'", "[Errno 2] No such file: …/b.json"),
        ("gone from /dev/shm/x/17: save them again", "gone from …/17: save them again"),
        (
            "http://127.0.0.1:80/v1/models and s3://bucket/a/b",
            "http://127.0.0.1:80/v1/models and s3://bucket/a/b",
        ),
        ("tinker://run:train:0/weights/a exists", "tinker://run:train:0/weights/a exists"),
        (
            "tinker://<run>/<weights|sampler_weights>/<name>",
            "tinker://<run>/<weights|sampler_weights>/<name>",
        ),
        ("0.5 GB/s, 3/4 of 'a', and/or 'b'", "0.5 GB/s, 3/4 of 'a', and/or 'b'"),
    ],
)
def test_absolute_paths_are_shortened_to_their_last_part(text: str, shown: str) -> None:
    assert without_paths(text) == shown


def test_the_place_of_a_checkpoint_is_left_out_also_where_it_has_spaces(tmp_path: Path) -> None:
    with pytest.raises(UserError) as missing:
        read_manifest(tmp_path / "my home" / "a")
    assert without_paths(str(missing.value)) == "no checkpoint at …/a: expected manifest.json, found none"
