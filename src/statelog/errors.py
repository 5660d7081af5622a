"""Errors, grouped by the reaction that they call for.

::

    StatelogError
      ConfigurationError   change a setting, the location or the query's plan, then start again
      ProcessorError       fix the code of the stateful processor
      StateMissingError    Spark and the log disagree: rewind or restore, then start again
      FencedError          a newer start owns the location: this one must stop
      PinExpiredError      the files of an old checkpoint are gone: read a newer one
      StorageError         the store did not answer: try again
      CorruptionError      stored bytes are damaged: restore, and report it
      ProtocolError        a message of another version or from another program: check the installation

Every error has a stable ``kind``, a message that names the object concerned, and a hint. Its text has all three, so an
error can be read back from the text that Spark's JVM makes of it.
"""

from __future__ import annotations

import re
import textwrap
import traceback
from enum import StrEnum
from typing import Final

from statelog.shown import plain_text

_HINT: Final = " Hint: "
_KEPT: Final = "\n\t"
"""Control characters that the text of an error may contain."""


class ErrorKind(StrEnum):
    """Stable error codes: new ones may be added, but existing ones never change."""

    INVALID_OPTION = "invalid-option"
    UNSUPPORTED_SETTING = "unsupported-setting"
    UNSUPPORTED_FEATURE = "unsupported-feature"
    UNSUPPORTED_KEY_TYPE = "unsupported-key-type"
    UNSUPPORTED_STATE_TYPE = "unsupported-state-type"
    UID_REQUIRED = "uid-required"
    WORKER_IMPORT = "worker-import"
    PARTITIONS_RENUMBERED = "partitions-renumbered"
    NO_BATCH_ID = "no-batch-id"
    STALE_DATAFRAME = "stale-dataframe"
    OTHER_OWNER = "other-owner"
    OTHER_SCHEMA = "other-schema"
    OTHER_SETTINGS = "other-settings"
    OPERATOR_REMOVED = "operator-removed"
    PROCESSOR_NOT_PICKLABLE = "processor-not-picklable"
    PROCESSOR_FAILED = "processor-failed"
    OUTPUT_MISMATCH = "output-mismatch"
    INITIAL_STATE = "initial-state"
    VALUE_MISMATCH = "value-mismatch"
    TOO_LARGE = "too-large"
    STATE_USAGE = "state-usage"
    COPIES_DIFFER = "copies-differ"
    RESULT_CHANGED = "result-changed"
    CHECKPOINT_MISSING = "checkpoint-missing"
    CHECKPOINT_INCOMPLETE = "checkpoint-incomplete"
    LOCATION_NOT_SHARED = "location-not-shared"
    NEWER_EPOCH = "newer-epoch"
    STALE_RUN = "stale-run"
    CONCURRENT_RUN = "concurrent-run"
    STALE_BATCH = "stale-batch"
    LOCAL_DISK = "local-disk"
    STORE_FAILED = "store-failed"
    STORE_UNAVAILABLE = "store-unavailable"
    STORE_BUSY = "store-busy"
    STORE_UNSAFE = "store-unsafe"
    OBJECT_MISSING = "object-missing"
    PIN_EXPIRED = "pin-expired"
    CHECKSUM = "checksum"
    FORMAT = "format"
    MATERIALIZATION = "materialization"
    RESTORE_DEADLINE = "restore-deadline"
    RPC = "rpc"
    PYTHON_PROCESS_LATE = "python-process-late"


class StatelogError(Exception):
    """Base of all errors that statelog raises.

    Parameters
    ----------
    message : str
        The problem and its place: operator, state, key, batch or object.
    kind : ErrorKind
        Stable code of the error.
    hint : str
        The remedy, as a sentence.
    """

    default_kind = ErrorKind.STORE_FAILED

    def __init__(self, message: str, *, kind: ErrorKind | None = None, hint: str = "") -> None:
        self.message = message = plain_text(_with_one_period(message), _KEPT)
        self.kind = kind or self.default_kind
        self.hint = hint = plain_text(hint, _KEPT)
        super().__init__(message + (f"{_HINT}{hint}" if hint else "") + f" [{self.kind}]")

    def __reduce__(self) -> tuple[object, ...]:
        return (error_from_parts, (type(self).__name__, self.message, str(self.kind), self.hint))


def _with_one_period(text: str) -> str:
    """Drop the second period of a text that ends with another error's text; three periods are an ellipsis."""
    periods = len(text) - len(text.rstrip("."))
    return text[:-1] if periods and periods % 2 == 0 else text


class ConfigurationError(StatelogError, ValueError):
    """A setting, the location or the shape of the query is wrong; nothing was changed."""

    default_kind = ErrorKind.INVALID_OPTION


class ProcessorError(StatelogError):
    """The user's processor failed, or its output or state does not fit the declared schemas."""

    default_kind = ErrorKind.PROCESSOR_FAILED


class StateMissingError(StatelogError):
    """The checkpoint that Spark's next batch starts from does not exist in the log."""

    default_kind = ErrorKind.CHECKPOINT_MISSING


class FencedError(StatelogError):
    """A newer start of the query has claimed the location, or the call belongs to an earlier start or batch."""

    default_kind = ErrorKind.NEWER_EPOCH


class PinExpiredError(StatelogError):
    """A checkpoint that is being read is no longer retained, and no pin keeps it."""

    default_kind = ErrorKind.PIN_EXPIRED


class StorageError(StatelogError):
    """A store operation failed; trying again is safe."""

    default_kind = ErrorKind.STORE_FAILED

    @property
    def is_transient(self) -> bool:
        """Whether repeating the request may succeed: no answer came, or the store asked for fewer requests."""
        return self.kind in (ErrorKind.STORE_UNAVAILABLE, ErrorKind.STORE_BUSY)


class CorruptionError(StatelogError):
    """Stored bytes differ from those written; the message names the file and the offset."""

    default_kind = ErrorKind.CHECKSUM


class ProtocolError(StatelogError):
    """A message between tasks and coordinator cannot be trusted or understood."""

    default_kind = ErrorKind.RPC


class ConfigurationWarning(UserWarning):
    """A query runs, but probably not as intended."""


class WorkerTraceback(Exception):
    """A traceback from another process, as text: the ``__cause__`` of an error that `error_of` returns."""


_ALL: Final[list[type[StatelogError]]] = [StatelogError, *StatelogError.__subclasses__()]
_CLASSES: Final = {cls.__name__: cls for cls in _ALL}


def error_from_parts(name: str, message: str, kind: str, hint: str) -> StatelogError:
    """Rebuild an error that crossed a process boundary as text."""
    known = next((one for one in ErrorKind if one == kind), None)  # another version may have others
    return _CLASSES.get(name, StatelogError)(message, kind=known, hint=hint)


# ---- Errors that cross Spark's JVM as text ----

_CAUSE: Final = "Its cause:"
_INDENT: Final = "    "
_SHOWN: Final = re.compile(
    rf"\bstatelog\.errors\.({'|'.join(_CLASSES)}): (.*?) \[({'|'.join(ErrorKind)})\]$"
    rf"(?:\n{_CAUSE}\n((?:{_INDENT}[^\n]*\n?)+))?",
    re.DOTALL | re.MULTILINE,
)
_TRACEBACK: Final = "Traceback (most recent call last):"
_RAISED: Final = re.compile(rf"{re.escape(_TRACEBACK)}\n(?:[ \t].*\n|\n)+([^\W\d][\w.<>]*(?::.*)?)$", re.MULTILINE)
"""A traceback, with the line that has the exception's type and the start of its text."""
_OTHER_RUN: Final = "CONCURRENT_STREAM_LOG_UPDATE"
"""Spark's error of a run that finds the files of another run of its query."""
_LATE_PROCESS: Final = "Python worker failed to connect back"
"""Spark's error if a Python process that it has started, such as a clock's, does not connect within 10 s."""


def note_cause(error: BaseException) -> None:
    """Add the traceback of an error's cause as a note, because Spark does not show the cause of a task's error."""
    if isinstance(error, StatelogError) and error.__cause__ is not None and not hasattr(error, "__notes__"):
        cause = "".join(traceback.format_exception(error.__cause__))
        error.add_note(f"{_CAUSE}\n{textwrap.indent(cause.rstrip(), _INDENT, lambda _: True)}")


def _stopped_by_another_run() -> FencedError:
    return FencedError(
        "Spark has stopped this run of the query: another run has written the same batch to the checkpointLocation.",
        kind=ErrorKind.CONCURRENT_RUN,
        hint="Only one run of a query may use a checkpointLocation. Stop all of its runs, then start one.",
    )


def _process_is_late() -> ProtocolError:
    return ProtocolError(
        "Spark started a Python process, but the process did not connect to Spark within 10 s.",
        kind=ErrorKind.PYTHON_PROCESS_LATE,
        hint="The machine was busy, or its imports are slow. Start the query again, or start fewer queries at a time.",
    )


def error_in_text(text: str) -> StatelogError | None:
    """Read the last error from a text, with its traceback as the cause; None if the text shows no error."""
    shown = list(_SHOWN.finditer(text))
    if not shown:
        if _OTHER_RUN in text:
            return _stopped_by_another_run()
        return _process_is_late() if _LATE_PROCESS in text else None
    found = shown[-1]
    name, told, kind, cause = found.groups()
    message, _, hint = told.rpartition(_HINT) if _HINT in told else (told, "", "")
    error = error_from_parts(name, message, kind, hint)
    if cause is None:
        # The traceback must be of the same process: Java frames separate the tracebacks of two processes.
        since = text.rfind("\n\tat ", 0, found.start()) + 1
        start = text.find(_TRACEBACK, since, found.start())
        cause = text[start : found.end()] if start >= 0 else found[0]
    error.__cause__ = WorkerTraceback(textwrap.dedent(cause).rstrip())
    return error


def failure_in_text(text: str) -> str | None:
    """The error that a text reports, in one line: the last one of statelog, or else the last Python exception."""
    error = error_in_text(text)
    if error is not None:
        return " ".join(f"{type(error).__name__}: {error}".split())
    raised = _RAISED.findall(text)
    return plain_text(raised[-1].rstrip()) if raised else None
