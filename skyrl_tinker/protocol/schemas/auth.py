"""API keys and tokens. The shapes are those of the SDK, whatever of them a server of one's own can fill."""

from skyrl_tinker.protocol.schemas.base import Message


class AuthTokenResponse(Message):
    jwt: str


class KeyOrganization(Message):
    name: str


class KeyUser(Message):
    """`email`: the key's name, as the SDK shows nothing else of whom a key belongs to."""

    email: str


class KeyDetails(Message):
    org_details: KeyOrganization
    user_details: KeyUser


class ApiKeyResponse(Message):
    key_id: int
    name: str
    note: str
    details: KeyDetails
