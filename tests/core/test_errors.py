"""Errors as text: what crosses Spark's JVM can be read back."""

from __future__ import annotations

import traceback

import pytest

from statelog import ErrorKind, FencedError, ProcessorError, ProtocolError, StatelogError
from statelog.errors import WorkerTraceback, error_in_text, failure_in_text, note_cause


def raised(error: StatelogError, *, cause: str = "") -> str:
    """What Spark's JVM says of an error in a worker; the worker leaves out the cause."""
    try:
        if not cause:
            raise error
        try:
            raise ZeroDivisionError(cause)
        except ZeroDivisionError as because:
            raise error from because
    except StatelogError as caught:
        note_cause(caught)
        caught.__cause__ = None
        text = "".join(traceback.format_exception(caught))
    return f"[STREAM_FAILED] x: PythonException: {text}\n\tat org.apache.spark.Task.run(Task.scala:1)\nCaused by: y\n"


@pytest.mark.parametrize(
    "message", ["op: failed.", "op: failed: one\n\ntwo [rpc].", "op: StatelogError: a Hint: b [rpc]."]
)
@pytest.mark.parametrize("cause", ["", "a line\n\n  and another"])
def test_an_error_is_read_back_from_the_text_of_a_trace(message: str, cause: str) -> None:
    error = ProcessorError(message, kind=ErrorKind.OUTPUT_MISMATCH, hint="Do this. Or that.")
    found = error_in_text(raised(error, cause=cause))
    assert type(found) is ProcessorError
    assert (found.message, found.kind, found.hint) == (error.message, error.kind, error.hint)
    assert str(found) == str(error)
    assert isinstance(found.__cause__, WorkerTraceback)
    shown = str(found.__cause__)
    assert shown.startswith("Traceback (most recent call last):\n  File ")
    assert shown.endswith(f"ZeroDivisionError: {cause}" if cause else str(error))
    assert "org.apache" not in shown


def test_of_several_errors_the_last_one_is_meant() -> None:
    """The others are what it was raised from; and each process shows its own traceback."""
    first, last = FencedError("gone", hint="Stop."), FencedError("over", kind=ErrorKind.STALE_RUN)
    found = error_in_text(raised(first) + raised(last))
    assert found is not None
    assert (found.message, found.kind, found.hint) == ("over", ErrorKind.STALE_RUN, "")
    assert str(found.__cause__).count("Traceback") == 1


@pytest.mark.parametrize(
    "text", ["", "ValueError: no [rpc]", "statelog.errors.Other: x [rpc]", "statelog.errors.FencedError: x [other]"]
)
def test_a_text_without_an_error_has_none(text: str) -> None:
    assert error_in_text(text) is None


def test_a_python_process_that_spark_waited_for_in_vain_is_named() -> None:
    text = "[STREAM_FAILED] x terminated with exception: Python worker failed to connect back. SQLSTATE: XXKST"
    found = error_in_text(text)
    assert isinstance(found, ProtocolError)
    assert found.kind is ErrorKind.PYTHON_PROCESS_LATE
    assert "Start the query again" in found.hint
    assert isinstance(error_in_text(text + raised(FencedError("gone"))), FencedError)


def traced(error: Exception) -> str:
    """What Spark's JVM says of an error in a function given to foreachBatch."""
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise error  # noqa: B904  # a traceback of two exceptions, without `from`
    except Exception as caught:
        text = "".join(traceback.format_exception(caught))
    return f"[FOREACH_BATCH_USER_FUNCTION_ERROR] x: Return Message: {text} SQLSTATE: 39000\n\tat org.apache.Task.run\n"


def test_a_failure_is_one_line() -> None:
    class TooFull(Exception):
        pass

    name = TooFull.__qualname__
    assert failure_in_text("") is failure_in_text("java.lang.Error: x\n\tat y") is None
    assert failure_in_text(traced(ValueError("the sink\x1b[31m is full: 5\nand more"))) == (
        "ValueError: the sink\\x1b[31m is full: 5"
    )
    assert str(failure_in_text(traced(TooFull()))).endswith(name)
    assert failure_in_text(raised(FencedError("gone\nnow.", hint="Stop.")) + traced(ValueError("x"))) == (
        "FencedError: gone now. Hint: Stop. [newer-epoch]"
    )


def test_an_error_without_a_traceback_is_its_own_cause() -> None:
    found = error_in_text("it failed: statelog.errors.FencedError: gone [newer-epoch]")
    assert str(found and found.__cause__) == "statelog.errors.FencedError: gone [newer-epoch]"


def test_only_an_error_with_a_cause_is_noted_once() -> None:
    plain, error = FencedError("gone"), FencedError("gone")
    other = ValueError("x")
    error.__cause__ = other.__cause__ = KeyError("y")
    for each in (plain, error, error, other):
        note_cause(each)
    assert [getattr(each, "__notes__", []) for each in (plain, other)] == [[], []]
    assert error.__notes__ == ["Its cause:\n    KeyError: 'y'"]


@pytest.mark.parametrize(
    ("cause", "shown"),
    [("it broke", "it broke."), ("It broke.", "It broke."), ("it broke...", "it broke..."), ("", "")],
)
def test_a_message_that_ends_with_that_of_a_cause_has_one_period(cause: str, shown: str) -> None:
    assert ProcessorError(f"init() failed: {cause}." if cause else "").message.removeprefix("init() failed: ") == shown
