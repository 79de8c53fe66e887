"""Where files are to be had."""

from datetime import datetime
from typing import Literal

from skyrl_tinker.protocol.schemas.base import Message


class ExternalWeightsUrlsResponse(Message):
    """Each good for a GET without headers until `expires`, which has a timezone."""

    urls: dict[str, str]
    expires: datetime


class TraceExportResponse(Message):
    """Never pending here."""

    status: Literal["ready"] = "ready"
    url: str
