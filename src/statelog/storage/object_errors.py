"""Meaning of a failed request to an object store, read from the text of obstore's error: it has no other form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from statelog.errors import ErrorKind, StorageError

_TEXT: Final = r'"((?:[^"\\]|\\.)*)"'
_STATUS: Final = re.compile(rf"\n\s+status: (\d{{3}}),\s+body: (?:None|(?:Some\(\s+)?{_TEXT})")
_PART: Final = re.compile(rf"DeleteFailed \{{\s+path: {_TEXT},\s+code: {_TEXT},\s+(?:message|reason): {_TEXT}")
_TRANSPORT: Final = re.compile(r"\bHttpError \{\s+kind: (\w+)")
_CAUSE: Final = re.compile(r'\b(?:message|error): "([^"]+)"')
_CODE: Final = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]*)</Message>")
_CREDENTIALS: Final = re.compile(r"TokenRequest|/latest/(?:api/token|meta-data|dynamic)")
# Said by the client library before the error of a profile's credentials, and by botocore without a connection.
_PROFILE: Final = re.compile(r"External AWS credential provider: ([^\n]+)")
_NO_CONNECTION: Final = re.compile(
    r"\b(?:EndpointConnection|Connect(?:ion)?Timeout|ReadTimeout|ConnectionClosed|HTTPClient)Error:"
)
_URL: Final = re.compile(r"https?://\S+")

_BUSY: Final = frozenset(("SlowDown", "ServerBusy", "Throttling", "ThrottlingException", "RequestLimitExceeded"))
# Transient whatever the status; the first two mean that another request for the same object is under way.
_PASSING: Final = frozenset(
    ("ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "InternalError", "ServiceUnavailable")
)
_NO_BUCKET: Final = frozenset(("NoSuchBucket", "ContainerNotFound"))
_LONGEST: Final = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """The store's answer to a failed request, or the reason why there is none."""

    status: int = 0
    """HTTP status; 0 if there was no answer, an unreadable one, or an error in spite of a good status."""
    code: str = ""
    """The store's own code, such as ``SlowDown``; empty if the answer had none."""
    message: str = ""
    """The store's own words."""
    transport: str = ""
    """Without an answer: where the request ended, such as ``Connect`` or ``Timeout``; empty if none was sent."""
    cause: str = ""
    """Without an answer: the operating system's or the TLS library's words."""

    @staticmethod
    def of(error: BaseException) -> Answer:
        """Read the answer from an error of obstore."""
        _, _, details = str(error).partition("\nDebug source:")
        if found := _STATUS.search(details):
            status, body = int(found[1]), (found[2] or "").replace('\\"', '"')
            return Answer(0 if status == 200 else status, _first(_CODE, body), _first(_MESSAGE, body)[:_LONGEST])
        if found := _PART.search(details):
            # One object of a request to delete many; Azure gives a status where S3 gives a code.
            status, code = (int(found[2]), "") if found[2].isdigit() else (0, found[2])
            return Answer(status, code, found[3][:_LONGEST])
        if transport := _TRANSPORT.search(details):
            if "kind: Builder" in details:
                return Answer(cause="an http:// endpoint needs permission")
            cause = "no TLS connection" if "InvalidData" in details else _first(_CAUSE, details)
            return Answer(transport=transport[1], cause=cause)
        return Answer()

    @property
    def is_taken(self) -> bool:
        """Whether the object was not created because its name exists."""
        return self.status == 412 or (self.status == 409 and self.code == "BlobAlreadyExists")


def is_behind_end(error: BaseException) -> bool:
    """Whether a range was asked for that begins behind the last byte; Azurite answers that at the very end."""
    return Answer.of(error).status == 416 or "Wanted range starting at" in str(error)


def storage_error(error: BaseException, operation: str, where: str, *, missing: bool = False) -> StorageError:
    """Turn an error of obstore into a StorageError; with `missing`, a missing object has a kind of its own.

    The error's text can hold a whole request. So the message shows only the store's own words, or without these the
    first line, shortened and without addresses.
    """
    answer = Answer.of(error)
    # An object is missing, rather than the bucket or the source of credentials.
    is_gone = answer.code == "NoSuchKey" or (isinstance(error, FileNotFoundError) and answer.code not in _NO_BUCKET)
    if missing and is_gone:
        kind, hint = ErrorKind.OBJECT_MISSING, "It was deleted, or the location is another one."
    else:
        kind, hint = _judge(answer)
    reason = _reason(answer) or _first_line(error)
    if said := _first(_PROFILE, str(error)):
        is_transient = _NO_CONNECTION.search(said) is not None
        kind = ErrorKind.STORE_UNAVAILABLE if is_transient else ErrorKind.STORE_FAILED
        reason = f"the profile that AWS_PROFILE names gives no credentials: {_URL.sub('(address)', said)[:_LONGEST]}"
        hint = "Check the profile on this host, or log in again (aws sso login); see docs/object-stores.md."
    if _CREDENTIALS.search(str(error)):
        reason = f"no credentials, and where they can be asked for: {reason}"
        hint = "Set credentials in the environment of driver and executors; see docs/object-stores.md."
    return StorageError(f"{operation} {where} failed: {reason.rstrip('.')}.", kind=kind, hint=hint)


def _judge(answer: Answer) -> tuple[ErrorKind, str]:
    status, code = answer.status, answer.code
    # An answer to HEAD never has a code; for a 503 with a code, the code decides.
    if status == 429 or code in _BUSY or (status == 503 and not code):
        return ErrorKind.STORE_BUSY, "The store asks for fewer requests; it may allow more to several folders."
    if status >= 500 or code in _PASSING or (answer.transport and answer.cause != "no TLS connection"):
        return ErrorKind.STORE_UNAVAILABLE, "It may pass; if it does not, check the network and the endpoint."
    if status in (401, 403):
        return ErrorKind.STORE_FAILED, "Check the credentials, and the permissions that docs/object-stores.md lists."
    if status == 404:
        return ErrorKind.STORE_FAILED, "Check the bucket's name, its region and the endpoint; it is not created here."
    if answer.cause:
        return ErrorKind.STORE_FAILED, "Check the endpoint: http needs AWS_ALLOW_HTTP=true (GOOGLE_..., AZURE_...)."
    return ErrorKind.STORE_FAILED, "Check the bucket's name, its region and the endpoint."


def _reason(answer: Answer) -> str:
    if answer.status or answer.code:
        said = f"{answer.status or ''} {answer.code}".strip()
        return f"{said}: {answer.message}" if answer.message else said
    if not answer.transport:
        return answer.cause
    happened = {"Timeout": "no answer in time", "Connect": "no connection"}.get(answer.transport, "connection lost")
    return f"{happened}: {answer.cause}" if answer.cause else happened


def _first_line(error: BaseException) -> str:
    line = _URL.sub("(address)", str(error).partition("\n")[0])
    return f"{type(error).__name__}: {line[:_LONGEST]}"


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return "" if found is None else found[1]
