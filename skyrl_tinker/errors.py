"""The error tree. Each class has one HTTP status and one category of a failed future.

SkyrlTinkerError              500  server
├── UserError                 400  user     the request is wrong; the message names field, found, expected
│   ├── UnauthenticatedError  401  user     no API key, or a revoked or unknown one
│   ├── ForbiddenError        403  user     a download URL was changed or has expired
│   ├── NotFoundError         404  user     no such session, model, checkpoint, future
│   ├── GoneError             410  user     the session is finished or expired
│   ├── SeqIdReusedError      422  user     the same seq_id was sent with another payload
│   ├── KeyLimitError         400  user     more than one API key may have; the message names the limit
│   ├── TooLargeError         413  user     body over the cap
│   ├── TooSlowError          408  user     the body did not arrive in time
│   └── NotSupportedError     400  user     part of the protocol that is not implemented yet
├── StateLostError            500  server   weights or a model's state that no record can rebuild
├── TrainerError              500  server   the ranks are broken: fresh ones must replay every model
│   ├── RankDiedError         500  server   a rank's process ended
│   └── NoPlaceError          500  server   the Ray cluster has no place for all ranks: it may have later
├── TrainerLostError          500  server   fresh ranks do not help, or Ray is gone: only a new engine does
├── ExhaustedError            500  server   the ranks lack memory for this; models are as before
├── SamplerError              500  server   the inference plane failed
│   ├── SamplerPausedError    500  server   somebody has paused the replica: it takes no request yet
│   └── RequestGivenUpError   500  server   the replica gave up one request, and goes on with others
├── StorageError              500  server   a disk is broken; models and weights are as before
│   ├── DiskFullError         500  server   it has no room: the same work may succeed later
│   └── StorageAwayError      500  server   object storage does not answer: it may later
├── StatementError            500  server   the database fails a statement each time: it takes too long
├── OverloadedError           429  server   too many requests wait; says when to try again
│   ├── NoRoomError           503  server   the disk is nearly full
│   ├── DatabaseError         503  server   the database is full, busy or away
│   └── UnavailableError      503  server   part of the server is away, and comes back
└── StartupError              500  server   the server cannot start; the message names the setting to change
    ├── RaySlowError          500  server   Ray had too little time on a busy machine: another try may do
    ├── WeightsAwayError      500  server   the weights are on their way: a later try has them
    └── LeaseLostError        500  server   another server has taken over the database

Errors that one package alone raises and handles are in that package.
"""

from typing import ClassVar, Literal, TypeVar

from skyrl_tinker.redaction import redact

Category = Literal["user", "server", "unknown"]
T = TypeVar("T")
MOST_CHARACTERS = 4096
"""Characters of a text about a failure that are kept: part of it may be a client's, of any length."""
_NO_REASON = "For further information visit "
"""Beginning of the line that pydantic adds to each error."""


def cut(text: str) -> str:
    """Return the first MOST_CHARACTERS of a text, and how many there were."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}… ({len(text)} characters)"


def last_line(text: str) -> str:
    """Return the last line of a log or a message that tells something, "none" without one."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line and not line.startswith(_NO_REASON)), "none")


class SkyrlTinkerError(Exception):
    """Error whose message a client, a log and the database may show: secrets in it are left out."""

    status: ClassVar[int] = 500
    category: ClassVar[Category] = "server"

    def __init__(self, message: str) -> None:
        super().__init__(redact(message))


def root_cause(error: BaseException) -> BaseException:
    """Return the first error of a group, which may have groups in it; any other is its own cause."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class UserError(SkyrlTinkerError):
    status = 400
    category = "user"

    def __init__(self, message: str) -> None:
        super().__init__(cut(message))


class UnauthenticatedError(UserError):
    status = 401


class ForbiddenError(UserError):
    status = 403


class NotFoundError(UserError):
    """Error whose text contains "not found": clients of several projects look for that."""

    status = 404

    def __str__(self) -> str:
        return f"not found: {super().__str__()}"


def found(value: T | None, otherwise: str) -> T:
    """Return what was looked for. Raises NotFoundError with the message `otherwise` if it is None."""
    if value is None:
        raise NotFoundError(otherwise)
    return value


class GoneError(UserError):
    status = 410


class SeqIdReusedError(UserError):
    status = 422


class KeyLimitError(UserError):
    pass


class TooLargeError(UserError):
    status = 413


class TooSlowError(UserError):
    status = 408


class NotSupportedError(UserError):
    status = 400


class StateLostError(SkyrlTinkerError):
    pass


class TrainerError(SkyrlTinkerError):
    pass


class RankDiedError(TrainerError):
    pass


class NoPlaceError(TrainerError):
    pass


class TrainerLostError(SkyrlTinkerError):
    pass


SEND_AGAIN = "send the request again, or "
"""Part of an ExhaustedError's advice that is of no use once the model is parked."""


class ExhaustedError(SkyrlTinkerError):
    """Memory ran out on a rank. Where ranks agree on it, all of them raise it, in the same place."""


class SamplerError(SkyrlTinkerError):
    pass


class OverloadedError(SkyrlTinkerError):
    status = 429

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoRoomError(OverloadedError):
    status = 503


class DatabaseError(OverloadedError):
    status = 503


class UnavailableError(OverloadedError):
    status = 503


class SamplerPausedError(SamplerError):
    pass


class RequestGivenUpError(SamplerError):
    pass


class StorageError(SkyrlTinkerError):
    pass


class DiskFullError(StorageError):
    pass


class StorageAwayError(StorageError):
    pass


class StatementError(SkyrlTinkerError):
    pass


class StartupError(SkyrlTinkerError):
    pass


class RaySlowError(StartupError):
    pass


class WeightsAwayError(StartupError):
    pass


class LeaseLostError(StartupError):
    """Another server has taken over the database: this one must end, and has committed nothing since."""
