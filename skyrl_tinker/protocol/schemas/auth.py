"""API keys and tokens: the SDK's shapes, as far as a self-hosted server can fill them."""

from skyrl_tinker.protocol.schemas.base import Message


class AuthTokenResponse(Message):
    jwt: str


class KeyOrganization(Message):
    name: str


class KeyUser(Message):
    """Holder of a key. `email` is the key's name: the SDK shows no other field of a holder."""

    email: str


class KeyDetails(Message):
    org_details: KeyOrganization
    user_details: KeyUser


class ApiKeyResponse(Message):
    key_id: int
    name: str
    note: str
    details: KeyDetails
