"""The operator, batch and subtask in the records of statelog's loggers."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import pytest

import statelog
from statelog.log_fields import LogFields, get_logger, in_background, log_fields, set_log_fields

FORMAT = logging.Formatter("%(statelog_operator)s/%(statelog_batch)s/%(statelog_subtask)s %(message)s")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [FORMAT.format(record) for record in caplog.records]


def test_records_have_the_fields_of_the_block_that_they_are_written_in(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger("statelog.test")
    log.warning("before")
    with log_fields(LogFields("op", 7, 2)):
        log.warning("in %s", "it")
        with log_fields(LogFields("other")):
            log.warning("deeper", extra={"more": 1})
        log.warning("still")
    log.warning("after")
    assert lines(caplog) == [
        "None/None/None before", "op/7/2 in it", "other/None/None deeper", "op/7/2 still", "None/None/None after",
    ]  # fmt: skip
    assert vars(caplog.records[2])["more"] == 1


def test_a_record_is_one_line_whatever_the_texts_in_it(caplog: pytest.LogCaptureFixture) -> None:
    """A stored name or the text of an error forges no record of its own, and no colours."""
    log = get_logger("statelog.test")
    log.warning("%s is %d: %s", "op\nWARN forged\x1b[31m", 3, ValueError("a\r\n\x9bb"))
    try:
        raise ValueError("damaged")
    except ValueError:
        log.exception("failed: %s", "a\nb")
    assert caplog.records[0].getMessage() == r"op\nWARN forged\x1b[31m is 3: a\r\n\x9bb"
    assert caplog.records[1].getMessage() == r"failed: a\nb"
    assert caplog.records[1].exc_info
    assert {record.funcName for record in caplog.records} == {"test_a_record_is_one_line_whatever_the_texts_in_it"}


def test_a_thread_in_the_background_is_about_the_operator_alone(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger("statelog.test")
    with log_fields(LogFields("op", 7, 2)):
        thread = threading.Thread(target=in_background(lambda: log.warning("deleted")))
        thread.start()
        thread.join()
    other = threading.Thread(target=lambda: log.warning("unknown"))
    other.start()
    other.join()
    assert lines(caplog) == ["op/None/None deleted", "None/None/None unknown"]


def test_a_worker_sets_the_fields_of_its_task(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        set_log_fields(LogFields("op", 8, 0))
        get_logger("statelog.test").warning("here")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert lines(caplog) == ["op/8/0 here"]


def test_every_logger_of_the_library_has_the_fields() -> None:
    package = Path(statelog.__file__).parent
    own = re.compile(r'logging\.getLogger\((?!f"py4j\.)')
    makers = {path.name for path in package.rglob("*.py") if own.search(path.read_text())}
    assert makers == {"log_fields.py"}
