"""Secrets out of messages, wherever a client put them by mistake: keys, JWTs and signatures of URLs.

Keys are ours, and those of Hugging Face, age and AWS.

Also the server's paths, out of answers to clients.
"""

import logging
import re

_SECRETS = re.compile(
    r"tml-[\w-]{16,}"  # also the beginning of a shortened one
    r"|eyJ[\w-]{8,}(?:\.[\w-]*){0,2}"
    r"|(?<=signature=)[0-9a-fA-F]{8,}"
    r"|hf_[A-Za-z0-9]{16,}"
    r"|AGE-SECRET-KEY-[0-9A-Z-]{8,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|(?P<name>(?i:aws_secret_access_key|aws_session_token)['\"]?\s*[=:]\s*['\"]?)[A-Za-z0-9/+=]{16,}"
)
_PATHS = re.compile(
    r"(?P<quote>['\"])/(?:(?!(?P=quote)).)*/(?P<quoted>(?:(?!(?P=quote))[^/])+)/*(?P=quote)"
    r"|(?<![\w./:~…>-])/(?:[^\s/:;,'\"()]+/)+(?P<bare>[^\s/:;,'\"()]+)/*"
)
"""Absolute paths, with spaces where they are quoted; not URLs, nor tinker:// paths and their form."""


def redact(text: str) -> str:
    return _SECRETS.sub(lambda found: f"{found['name'] or ''}[secret]", text)


def without_paths(text: str) -> str:
    """Shorten absolute paths to their last part: where this server's files lie is no client's business."""
    return _PATHS.sub(lambda found: f"…/{found['quoted'] or found['bare']}", text)


def log_to_stderr() -> None:
    """Set up the log of a process."""
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class RedactingFormatter(logging.Formatter):
    """Formatter of log records, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
