"""Secrets out of messages: API keys, JWTs and signatures of URLs, wherever a client put them by mistake."""

import logging
import re

_SECRETS = re.compile(
    r"tml-[\w-]{16,}"  # also the beginning of a shortened one
    r"|eyJ[\w-]{8,}(?:\.[\w-]*){0,2}"
    r"|(?<=signature=)[0-9a-fA-F]{8,}"
)


def redact(text: str) -> str:
    return _SECRETS.sub("[secret]", text)


class RedactingFormatter(logging.Formatter):
    """Formatter of log records, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
